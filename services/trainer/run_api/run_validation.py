"""Everything that can be wrong with a run and be known before it starts.

    settings --> model, data sets --> reward functions --> ValidRun(warnings, what it amounts to)

All of it is asked, so that one answer names all that is wrong; only the settings are a condition for the rest. Blocking
looks at disk and hub happen in threads, under deadlines.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from services.trainer.data.dataset_check import DatasetSummary, SourceSummary, check_dataset
from services.trainer.loop.schedule import BatchShape, total_steps
from services.trainer.loop.staleness import window
from services.trainer.push.deadline_thread import in_thread
from services.trainer.run_api.gpu_check import what_needs_a_gpu
from services.trainer.run_api.lora_check import why_not_4bit
from services.trainer.run_api.model_check import HubLookup, check_model, hub_lookup, is_hub_id
from services.trainer.run_api.problems import Problem, invalid_run
from services.trainer.run_api.report_check import check_reports
from services.trainer.run_api.reward_check import RewardNeeds, check_rewards
from services.trainer.settings import TrainerSettings
from shared.errors import UnavailableError, UserError
from shared.run_config import RunConfig, parse_run_config
from shared.run_options.data import DatasetSource

_MAX_KEYS = 200

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
        self._dataset_check = dataset_check or check_dataset
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
        base = why_not_4bit(config, self._settings.rank_environment())
        checked = [
            model.result(),
            dataset.result(),
            rewards.result(),
            _Checked(errors=check_reports(config.report_to)),
            _Checked(errors=what_needs_a_gpu(config, self._settings.rank_environment())),
            _Checked(errors=[] if base is None else [("load_in_4bit", base)]),
        ]
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
        timeout_s = self._settings.dataset_check_timeout_s
        sources = config.train_sources() | dict(filter(None, [config.eval_source()]))
        if misplaced := [(name, _not_a_place(source)) for name, source in sources.items() if not _is_a_place(source)]:
            return _Checked(errors=misplaced)
        names = ", ".join(dict.fromkeys(source.path[:200] for source in sources.values()))
        try:
            summary = await in_thread(lambda: self._dataset_check(config), timeout_s=timeout_s, name="check dataset")
            return _judge_dataset(config, summary)
        except UserError as error:
            return _Checked(errors=[(error.field or "dataset_name", str(error))])
        except TimeoutError:
            detail = (
                f"Reading the dataset {names} took longer than {timeout_s:g} s. If it is being downloaded, submit "
                "again later; otherwise raise HEADRACE_DATASET_CHECK_TIMEOUT_S."
            )
            return _Checked(problem=Problem(503, "Dataset not checked", detail, headers={"Retry-After": "30"}))
        except UnavailableError as error:
            detail = f"The dataset {names} could not be checked: {error}. Submit again later."
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


def _is_a_place(source: DatasetSource) -> bool:
    return source.path.startswith("/") or (
        not source.path.endswith((".jsonl", ".json", ".parquet")) and is_hub_id(source.path)
    )


def _not_a_place(source: DatasetSource) -> str:
    return (
        f"{source.path[:200]!r} is neither an absolute path nor a Hugging Face id. A relative path means nothing to "
        "the trainer: give the absolute one (`headrace submit` makes it absolute for you)"
    )


def _judge_dataset(config: RunConfig, summary: DatasetSummary) -> _Checked:
    errors: list[tuple[str, str]] = []
    warnings: list[str] = []
    for source in summary.all_sources():
        if source.num_bad == source.num_checked or (source.num_bad and source.is_file):
            errors.append((source.field, _found(source) + (". Mend or remove them" if source.is_file else "")))
        elif source.num_bad:
            warnings.append(f"{source.path}: {_found(source)}. Such rows are dropped and counted")
    if errors:
        return _Checked(errors=errors)
    steps = total_steps(config, num_rows=summary.epoch)
    num_groups = BatchShape.of(config).groups(num_steps=steps)
    warnings += _repetitions(config, summary, steps=steps, num_groups=num_groups)
    if steps < config.save_steps:
        warnings.append(
            f"save_steps={config.save_steps} is more than the {steps} steps of the run: the only checkpoint is the last"
        )
    derived: dict[str, Any] = {
        "num_rows": sum(source.num_rows for source in summary.sources),
        "columns": sorted(str(column) for column in summary.columns),
        "steps": steps,
        "prompt_groups": num_groups,
        "completions": num_groups * config.num_generations,
        "max_completion_tokens": num_groups * config.num_generations * config.max_completion_length,
        "max_groups_in_flight": window(
            num_steps_left=steps, max_staleness=config.max_staleness, shape=BatchShape.of(config)
        ),
    }
    if config.datasets is not None:
        derived["epoch_prompts"] = summary.epoch
        derived["datasets"] = [
            f"{source.path}: {source.num_rows} rows, {source.share:.4g} of the prompts" for source in summary.sources
        ]
    if summary.evaluation is not None:
        derived["eval_prompts"] = min(summary.evaluation.num_rows, config.max_eval_prompts)
    return _Checked(warnings=warnings, derived=derived)


def _found(source: SourceSummary) -> str:
    of = (
        f"{source.num_checked} rows"
        if source.num_checked == source.num_rows
        else f"the first {source.num_checked} rows"
    )
    return f"{source.num_bad} of {of} cannot be used; the first: {source.first_bad}"


def _repetitions(config: RunConfig, summary: DatasetSummary, *, steps: int, num_groups: int) -> list[str]:
    if config.max_steps < 0:  # num_train_epochs says so itself
        return []
    warnings: list[str] = []
    for source in summary.sources:
        wanted = math.ceil(num_groups * source.share)
        if wanted > source.num_rows:
            of_which = "" if config.datasets is None else f", {wanted} of them from {source.path}"
            warnings.append(
                f"{steps} steps with groups_per_step={config.groups_per_step} need {num_groups} prompts{of_which} and "
                f"the dataset has {source.num_rows}: each is used up to {math.ceil(wanted / source.num_rows)} times"
            )
    return warnings


def _missing_columns(needs: list[RewardNeeds], columns: list[str]) -> list[str]:
    return [
        f"the reward function {need.name} asks for the column {missing}, which the dataset does not have: it will fail "
        "for every group. Add the column, or give the argument a default"
        for need in needs
        for missing in need.missing(columns)
    ]
