"""Everything that can be wrong with a run and be known before it starts.

    settings --> model, dataset --> reward functions --> ValidRun(warnings, what it amounts to)

All of it is asked, so that one answer names all that is wrong; only the settings are a condition for the rest. Blocking
looks at disk and hub happen in threads, under deadlines.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from services.trainer.dataset import DatasetSummary, check_dataset
from services.trainer.dataset_rows import is_local
from services.trainer.deadline_thread import in_thread
from services.trainer.model_check import HubLookup, check_model, hub_lookup, is_hub_id
from services.trainer.problems import Problem, invalid_run
from services.trainer.reward_check import RewardNeeds, check_rewards
from services.trainer.schedule import total_steps
from services.trainer.settings import TrainerSettings
from shared.errors import UnavailableError, UserError
from shared.run_config import RunConfig, parse_run_config

_MAX_KEYS = 200
_HUB_ROWS = 1000


DatasetCheck = Callable[[RunConfig], DatasetSummary]


@dataclass(frozen=True)
class ValidRun:
    """A config that nothing speaks against.

    Args:
        config: The settings, with defaults.
        warnings: Sentences about what may surprise.
        derived: What the settings amount to.
    """

    config: RunConfig
    warnings: list[str] = field(default_factory=list[str])
    derived: dict[str, Any] = field(default_factory=dict[str, Any])


class RunValidator:
    """Checks what is submitted.

    Args:
        settings: Deadlines, and where the rewarder is.
        dataset_check: Reads a dataset; dataset.py's if left out.
        lookup: Asks a hub for a model; the Hugging Face hub if left out.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        dataset_check: DatasetCheck | None = None,
        lookup: HubLookup | None = None,
    ) -> None:
        self._settings = settings
        self._dataset_check = dataset_check or _look_at_rows
        self._lookup = lookup or hub_lookup(settings.hub_timeout_s)

    async def validate(self, raw: Any) -> ValidRun:
        """Return the run.

        Raises:
            Problem: 422 with one sentence for each thing that is wrong, or 503 if the rewarder is away.
        """
        config = _parse(raw)
        async with asyncio.TaskGroup() as tasks:
            model = tasks.create_task(self._check_model(config), name="check model")
            dataset = tasks.create_task(self._check_dataset(config), name="check dataset")
            rewards = tasks.create_task(self._check_rewards(config), name="check rewards")
        checked = [model.result(), dataset.result(), rewards.result()]
        errors = [error for result in checked for error in result.errors]
        if errors:
            raise invalid_run(errors)
        for result in checked:
            if result.problem is not None:
                raise result.problem
        warnings = [warning for result in checked for warning in result.warnings]
        derived = dataset.result().derived
        warnings += _missing_columns(rewards.result().needs, derived["columns"])
        return ValidRun(config=config, warnings=warnings, derived=derived)

    async def _check_model(self, config: RunConfig) -> "_Checked":
        # Two requests of the hub's client may each take the deadline.
        timeout_s = 2 * self._settings.hub_timeout_s
        try:
            warnings = await in_thread(
                lambda: check_model(config, lookup=self._lookup), timeout_s=timeout_s, name="check model"
            )
        except UserError as error:
            return _Checked(errors=[(error.field or "model", str(error))])
        except TimeoutError:
            return _Checked(warnings=[f"the model was not checked: looking at it took longer than {timeout_s:g} s"])
        return _Checked(warnings=warnings)

    async def _check_dataset(self, config: RunConfig) -> "_Checked":
        name, timeout_s = config.dataset_name, self._settings.dataset_check_timeout_s
        if not name.startswith("/") and (name.endswith((".jsonl", ".json", ".parquet")) or not is_hub_id(name)):
            message = (
                f"{name[:200]!r} is neither an absolute path nor a Hugging Face id. A relative path means nothing to "
                "the trainer: give the absolute one (`headrace submit` makes it absolute for you)"
            )
            return _Checked(errors=[("dataset_name", message)])
        try:
            summary = await in_thread(lambda: self._dataset_check(config), timeout_s=timeout_s, name="check dataset")
            return _judge_dataset(config, summary)
        except UserError as error:
            return _Checked(errors=[(error.field or "dataset_name", str(error))])
        except TimeoutError:
            detail = (
                f"Reading the dataset {name[:200]} took longer than {timeout_s:g} s. If it is being downloaded, submit "
                "again later; otherwise raise HEADRACE_DATASET_CHECK_TIMEOUT_S."
            )
            return _Checked(problem=Problem(503, "Dataset not checked", detail, headers={"Retry-After": "30"}))
        except UnavailableError as error:
            detail = f"The dataset {name[:200]} could not be checked: {error}. Submit again later."
            return _Checked(problem=Problem(503, "Dataset not checked", detail, headers={"Retry-After": "30"}))

    async def _check_rewards(self, config: RunConfig) -> "_Checked":
        try:
            needs = await check_rewards(
                config,
                rewarder_url=self._settings.rewarder_url,
                api_key=self._settings.api_key.get_secret_value(),
                timeout_s=self._settings.reward_check_timeout_s,
            )
        except Problem as error:
            if error.status == 422:
                return _Checked(errors=[(item["field"], item["message"]) for item in error.body["errors"]])
            return _Checked(problem=error)
        return _Checked(needs=needs)


@dataclass(frozen=True)
class _Checked:
    errors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    problem: Problem | None = None
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    needs: list[RewardNeeds] = field(default_factory=list[RewardNeeds])


def _parse(raw: Any) -> RunConfig:
    if not isinstance(raw, dict):
        raise invalid_run([("", 'a run is a JSON object of settings, such as {"model": ..., "dataset_name": ...}')])
    if len(cast("dict[str, Any]", raw)) > _MAX_KEYS:
        # Each unknown key is compared with every known one.
        num_known = len(RunConfig.model_fields)
        raise invalid_run([("", f"there are {num_known} settings; this run names more than {_MAX_KEYS}")])
    try:
        return parse_run_config(raw)
    except UserError as error:
        raise invalid_run(error.problems or [(error.field or "", str(error))]) from error


def _look_at_rows(config: RunConfig) -> DatasetSummary:
    """Look at every row of a file, which its owner can mend, and at the first ones of a dataset of the hub."""
    return check_dataset(config, limit=None if is_local(config) else _HUB_ROWS)


def _judge_dataset(config: RunConfig, summary: DatasetSummary) -> _Checked:
    warnings: list[str] = []
    if summary.num_bad:
        found = f"{summary.num_bad} of {summary.num_rows} rows cannot be used; the first: {summary.first_bad}"
        if is_local(config):
            return _Checked(errors=[("dataset_name", f"{found}. Mend or remove them")])
        warnings.append(f"{found}. Such rows are dropped and counted")
    steps = total_steps(config, num_rows=summary.num_rows)
    num_groups = steps * config.groups_per_step
    if num_groups > summary.num_rows and config.max_steps > 0:
        times = math.ceil(num_groups / summary.num_rows)
        warnings.append(
            f"{steps} steps with groups_per_step={config.groups_per_step} need {num_groups} prompts and the dataset "
            f"has {summary.num_rows}: each is used up to {times} times"
        )
    if steps < config.save_steps:
        warnings.append(
            f"save_steps={config.save_steps} is more than the {steps} steps of the run: the only checkpoint is the last"
        )
    derived = {
        "num_rows": summary.num_rows,
        "columns": sorted(str(column) for column in summary.columns),
        "steps": steps,
        "prompt_groups": num_groups,
        "completions": num_groups * config.num_generations,
        "max_completion_tokens": num_groups * config.num_generations * config.max_completion_length,
        "max_groups_in_flight": (config.max_staleness + 1) * config.groups_per_step,
    }
    return _Checked(warnings=warnings, derived=derived)


def _missing_columns(needs: list[RewardNeeds], columns: list[str]) -> list[str]:
    return [
        f"the reward function {need.name} asks for the column {missing}, which the dataset does not have: it will fail "
        "for every group. Add the column, or give the argument a default"
        for need in needs
        for missing in need.missing(columns)
    ]
