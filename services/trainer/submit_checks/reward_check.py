"""Asks the rewarder whether it knows a run's reward functions, and which columns they need.

POST {rewarder_url}/v1/rewards/check   {"reward_funcs": [...], "reward_kwargs": {...}}
                                       -> 200 with the columns they need, or 422
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from services.trainer.submit_checks.service_check import CheckingService, ask
from services.trainer.telemetry.metric_catalogue import find_metric
from services.trainer.telemetry.step_metrics import metric_names
from shared.run_options.run_config import RunConfig
from shared.service.tls import PUBLIC_TLS, PeerTls

_REWARDER = CheckingService(
    "rewarder", "/v1/rewards/check", "HEADRACE_REWARDER_URL", option="reward_funcs", what="reward functions"
)


@dataclass(frozen=True)
class RewardNeeds:
    """The columns that one reward function needs: one column of each inner list of ``columns``."""

    name: str
    columns: list[list[str]]

    def missing(self, columns: Collection[str]) -> list[str]:
        """Return the missing columns, as words: alternatives are joined with "or". Empty if none is missing."""
        return [" or ".join(choice) for choice in self.columns if choice and not set(choice) & set(columns)]


async def check_rewards(
    config: RunConfig, *, rewarder_url: str, api_key: str, timeout_s: float, tls: PeerTls = PUBLIC_TLS
) -> list[RewardNeeds]:
    """Ask the rewarder, and return the data set columns that each of the run's reward functions needs.

    Raises:
        Problem: 422 with the rewarder's own sentence, or 503 if the rewarder cannot be used.
    """
    if not config.reward_funcs:  # the environment's reward is enough
        return []
    # Left out if empty: an older rewarder refuses an unknown key.
    kwargs = {"reward_kwargs": config.reward_kwargs} if config.reward_kwargs else {}
    body = {"reward_funcs": config.reward_funcs} | kwargs
    return _needs(await ask(_REWARDER, body, url=rewarder_url, api_key=api_key, timeout_s=timeout_s, tls=tls))


def _needs(answer: dict[str, Any]) -> list[RewardNeeds]:
    try:
        return [RewardNeeds(str(item["name"]), list(item["required_columns"])) for item in answer["reward_funcs"]]
    except (KeyError, TypeError):
        return []  # a rewarder that does not report them


def unknown_metric(config: RunConfig) -> list[str]:
    """Return a warning if evaluations may lack the metric by which the run finds its best checkpoint, else []."""
    if not config.finds_best:
        return []
    name = config.best_metric_name
    found = find_metric(name)
    rewards = [*metric_names(config.reward_funcs).values()]
    is_of_reward = found is not None and found[1].get("reward") in (None, *rewards)
    if is_of_reward or (found is not None and config.environment_factory is not None):
        return []
    offered = ", ".join(f"rewards/{reward}/mean" for reward in rewards)
    return [
        f"metric_for_best_model: if the first evaluation does not have {name}, the run fails then; every evaluation "
        f"has reward{', ' if offered else ''}{offered} and completions/mean_length, and what reward functions log with "
        "log_metric. With eval_on_start: true the first one is made at once"
    ]
