"""Our metrics of rollouts and rewards have the same names and values as in TRL's GRPOTrainer."""

import importlib
import inspect
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.objective.advantages import batch_advantages, combined_rewards
from services.trainer.telemetry.metric_catalogue import METRICS
from services.trainer.telemetry.step_metrics import TrainedGroup, num_seen_tokens, rollout_metrics
from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.messages import PromptGroup as SentGroup
from shared.messages import Rollout, Row, ScoredGroup, Turn, VersionSpan
from shared.run_options.run_config import RunConfig
from tests.conformance.batches import REWARD_NAMES, PromptGroup, outcomes, random_groups
from tests.conformance.conftest import Models
from tests.conformance.oracle import make_oracle, metrics, score

WEIGHTS = (1.0, 0.5)


def with_special_groups(groups: list[PromptGroup]) -> list[PromptGroup]:
    """Return the groups, the first with equal rewards, the second with a completion to which no function applies."""
    equal, unscored = groups[0], groups[1]
    equal = replace(equal, completions=tuple(replace(c, rewards=(0.25, None)) for c in equal.completions))
    nothing = replace(unscored.completions[0], rewards=(None, None))
    return [equal, replace(unscored, completions=(nothing, *unscored.completions[1:])), *groups[2:]]


def as_trained(groups: list[PromptGroup], config: RunConfig) -> list[TrainedGroup]:
    """Return the groups as our services would pass them to the trainer."""
    said = [outcomes(group, WEIGHTS) for group in groups]
    advantages = batch_advantages(
        said, scale_rewards=config.scale_rewards, aggregation=config.multi_objective_aggregation
    )
    return [
        TrainedGroup(
            waiting=WaitingGroup(number, _scored(number, group), 0),
            rewards_G=combined_rewards(outcomes_G),
            advantages_G=np.zeros(len(outcomes_G)) if advantages_G is None else advantages_G,
            has_signal=advantages_G is not None,
        )
        for number, (group, outcomes_G, advantages_G) in enumerate(zip(groups, said, advantages, strict=True))
    ]


def _scored(number: int, group: PromptGroup) -> ScoredGroup:
    group_id, num_prompt = f"{number:08d}", len(group.prompt_ids)
    rollouts = tuple(
        Rollout(
            rollout_id=f"{group_id}-{branch}",
            group_id=group_id,
            branch=branch,
            rows=(
                Row(
                    token_ids=pack_ids([*group.prompt_ids, *completion.token_ids]),
                    loss_mask=pack_mask([0] * num_prompt + list(completion.is_sampled)),
                    logprobs=pack_logprobs(
                        list(itertools.compress(completion.generator_logprobs, completion.is_sampled))
                    ),
                    version_spans=(VersionSpan(0, 0, sum(completion.is_sampled)),),
                    turns=(
                        Turn("assistant", num_prompt, 0, "length" if completion.is_truncated else "stop", 0.0, 1.0),
                    ),
                ),
            ),
            completion="",
            rewards=tuple(said),
        )
        for branch, (completion, said) in enumerate(zip(group.completions, outcomes(group, WEIGHTS), strict=True))
    )
    prompt = SentGroup("run-test", group_id, group.prompt, pack_ids(group.prompt_ids), {}, len(rollouts))
    return ScoredGroup(prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_the_metrics_of_rollouts_are_trls(options: dict[str, Any], models: Models, tmp_path: Path) -> None:
    groups = with_special_groups(random_groups(4, 4, seed=5))
    config = RunConfig(
        model="m", dataset_name="/data.jsonl", reward_funcs=list(REWARD_NAMES), reward_weights=list(WEIGHTS), **options
    )
    oracle = make_oracle(models.start, groups, tmp_path, num_generations=4, reward_weights=list(WEIGHTS), **options)
    score(oracle, groups)
    theirs = {name: value for name, value in metrics(oracle).items() if not name.startswith("sampling/")}

    trained = as_trained(groups, config)
    ours = rollout_metrics(trained, policy_version=0, config=config) | {"num_tokens": float(num_seen_tokens(trained))}

    assert theirs.keys() <= ours.keys()
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    assert {name for name in ours.keys() - theirs.keys() if not name.endswith(("failed_ratio", "latency_s"))} == {
        "staleness/min", "staleness/mean", "staleness/max",
    }  # fmt: skip
    assert not any(math.isnan(value) for value in theirs.values())


def test_every_metric_of_trls_grpo_trainer_is_one_of_ours() -> None:
    """Trainer itself adds a few more."""
    source = inspect.getsource(importlib.import_module("trl.trainer.grpo_trainer"))
    theirs = set(re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source))
    assert len(theirs) > 25, "the names are found in the source"
    theirs = {name.replace("{reward_func_name}", "{reward}") for name in theirs}
    ours = {metric.name for metric in METRICS if metric.in_trl}
    assert theirs - ours == set()
    assert ours - theirs == {"loss", "grad_norm", "learning_rate", "eval_runtime"}
