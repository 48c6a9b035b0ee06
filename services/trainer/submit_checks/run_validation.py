"""Finds every error of a run that can be found before it starts.

    settings --> checkpoint, model, data sets, reward functions, tools, vLLM's options --> ValidRun(warnings, derived)

All checks are made, so that one answer names all errors. Only invalid settings, and paths outside the allowed places,
end the validation early. Blocking access to disk and hub happens in threads, with timeouts.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from services.trainer.problems import Problem, invalid_run
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.beginning_check import FindRuns, check_beginning
from services.trainer.submit_checks.checked import Checked, checked_in_thread
from services.trainer.submit_checks.dataset_check import DatasetSummary, check_dataset
from services.trainer.submit_checks.dataset_verdict import judge_dataset
from services.trainer.submit_checks.engine_check import what_weakens_learning
from services.trainer.submit_checks.model_check import HubLookup, check_model, hub_lookup, is_hub_id
from services.trainer.submit_checks.reward_check import RewardNeeds, check_rewards, unknown_metric
from services.trainer.submit_checks.surroundings_check import check_surroundings, check_weight_dir
from services.trainer.submit_checks.tool_check import check_tools
from shared.beginning import Beginning
from shared.engine_check import EngineVerdict
from shared.errors import UnavailableError, UserError
from shared.messages import MAX_MESSAGE_BYTES
from shared.run_options.data import DatasetSource
from shared.run_options.loss import what_departs_from_gspo
from shared.run_options.reward_kwargs import also_columns
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.run_options.run_places import misplaced
from shared.service.tls import PeerTls

_MAX_KEYS = 200
_MAX_READ_AT_ONCE = 4
"""Checks that read data sets at a time: a file is in memory as a whole."""
_BYTES_PER_TOKEN, _BYTES_PER_PROMPT_TOKEN = 13, 5
"""In a message, for each completion: 4 for the id, 1 for the mask; of sampled tokens also 4 for the logprob and about 4
of text."""

DatasetCheck = Callable[[RunConfig], DatasetSummary]
EngineCheck = Callable[[RunConfig], Awaitable[EngineVerdict]]


@dataclass(frozen=True)
class ValidRun:
    """A submitted run that passed all checks.

    Args:
        config: The settings, with defaults.
        warnings: Sentences about possible surprises.
        derived: Quantities that follow from the settings.
    """

    config: RunConfig
    warnings: list[str] = field(default_factory=list[str])
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    beginning: Beginning | None = None
    """The checkpoint that the run begins from."""


class RunValidator:
    """Makes all checks of a submitted run.

    Args:
        settings: Timeouts, and the addresses of the services that check parts of a run.
        dataset_check: Reads a dataset; dataset_check.py's by default.
        lookup: Looks a model up on a hub; the Hugging Face hub by default.
        engine_check: Checks options that only vLLM knows. Without it they are not checked.
        find_runs: Returns the runs that an id, name or beginning of an id fits; none by default.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        dataset_check: DatasetCheck | None = None,
        lookup: HubLookup | None = None,
        engine_check: EngineCheck | None = None,
        find_runs: FindRuns | None = None,
    ) -> None:
        self._find_runs = find_runs
        self._settings = settings
        self._engine_check = engine_check
        self._dataset_check = dataset_check or functools.partial(check_dataset, roots=settings.places_of_data())
        self._lookup = lookup or hub_lookup(settings.hub_timeout_s)
        self._reading = asyncio.Semaphore(_MAX_READ_AT_ONCE)

    async def validate(self, raw: Any) -> ValidRun:
        """Check a run's settings and everything that they name, and return the validated run.

        Raises:
            Problem: 422 with one sentence per error, or 503 if a service that checks a part of the run is away, or the
                files, the checkpoint or the data sets could not be read in time.
            UnavailableError: Redis is away.
        """
        config = _parse(raw)
        places = await self._check_places(config)
        if places.problem is not None:
            raise places.problem
        if outside := places.errors:  # places outside the allowed ones are not read, so the other checks are left out
            named = await asyncio.gather(_answered(self._check_rewards(config)), _answered(self._check_tools(config)))
            raise invalid_run([*outside, *(error for result in named for error in result.errors)])
        began = await check_beginning(config, find_runs=self._find_runs, settings=self._settings)
        beginning = began.beginning
        steps_before = 0 if beginning is None else beginning.steps_before
        async with asyncio.TaskGroup() as tasks:
            model = tasks.create_task(self._check_model(config), name="check model")
            dataset = tasks.create_task(self._check_dataset(config, steps_before=steps_before), name="check dataset")
            rewards = tasks.create_task(_answered(self._check_rewards(config)), name="check rewards")
            tools = tasks.create_task(_answered(self._check_tools(config)), name="check tools")
            engine = tasks.create_task(_answered(self._check_engine(config)), name="check engine")
            weight_dir = tasks.create_task(self._check_weight_dir(config), name="check weight_dir")
        checked = [
            began,
            model.result(),
            dataset.result(),
            rewards.result(),
            tools.result(),
            engine.result(),
            weight_dir.result(),
            Checked(warnings=[*what_weakens_learning(config), *unknown_metric(config)]),
            Checked(warnings=what_departs_from_gspo(config.loss_type, config.importance_sampling_level)),
            Checked(errors=check_group_size(config)),
            Checked(errors=check_surroundings(config, self._settings), warnings=unread_options(config)),
        ]
        columns = dataset.result().derived.get("columns", [])
        checked.append(Checked(errors=[("reward_kwargs", why) for why in also_columns(config.reward_kwargs, columns)]))
        errors = list(dict.fromkeys(error for result in checked for error in result.errors))
        if errors:
            raise invalid_run(errors)
        for result in checked:
            if result.problem is not None:
                raise result.problem
        warnings = [warning for result in checked for warning in result.warnings]
        warnings += await self._same_name(config.name)
        derived = dataset.result().derived
        needs = rewards.result().needs
        if config.max_steps != 0:  # else the run only evaluates, on other rows
            warnings += _missing_columns(needs, derived["columns"], of="dataset", fails="for every group")
        if "eval_columns" in derived:
            warnings += _missing_columns(
                needs, derived["eval_columns"], of="evaluation set", fails="in every evaluation"
            )
        if beginning is not None:
            derived["begins_from"] = beginning.in_words()
        return ValidRun(config=config, warnings=warnings, derived=derived, beginning=beginning)

    async def _same_name(self, name: str | None) -> list[str]:
        """Return a warning if other runs have this name; empty if none has it."""
        if name is None or self._find_runs is None:
            return []
        found = [record for record in await self._find_runs(name) if record.name == name]
        if not found:
            return []
        newest = f"{found[0].run_id} ({found[0].status})"
        others = f"another run, {newest}, has" if len(found) == 1 else f"{len(found)} other runs have"
        which = "" if len(found) == 1 else f", the newest is {newest}"
        return [f"name: {others} the name {name}{which}. To change one of them, give its id"]

    async def _check_places(self, config: RunConfig) -> Checked:
        data, weights = self._settings.places_of_data(), self._settings.places_of_weights()
        timeout_s = self._settings.hub_timeout_s
        detail = f"The files that the run names did not answer within {timeout_s:g} s: is a disk of the trainer away?"
        return await checked_in_thread(
            "places",
            lambda: Checked(errors=misplaced(config, data=data, weights=weights)),
            timeout_s=timeout_s,
            too_slow=Checked(problem=Problem(503, "Files not checked", detail, headers={"Retry-After": "30"})),
        )

    async def _check_model(self, config: RunConfig) -> Checked:
        # The hub's client may make three requests, each with the timeout.
        timeout_s = 3 * self._settings.hub_timeout_s
        return await checked_in_thread(
            "model",
            lambda: Checked(warnings=check_model(config, lookup=self._lookup)),
            timeout_s=timeout_s,
            too_slow=Checked(warnings=[f"the model was not checked: the check took longer than {timeout_s:g} s"]),
        )

    async def _check_weight_dir(self, config: RunConfig) -> Checked:
        if config.weight_dir is None:
            return Checked()
        where, timeout_s = config.weight_dir, self._settings.hub_timeout_s
        return await checked_in_thread(
            "weight_dir",
            lambda: Checked(errors=check_weight_dir(where)),
            timeout_s=timeout_s,
            too_slow=Checked(warnings=[f"weight_dir was not checked: it did not answer within {timeout_s:g} s"]),
        )

    async def _check_dataset(self, config: RunConfig, *, steps_before: int) -> Checked:
        timeout_s = self._settings.dataset_check_timeout_s
        sources = config.train_sources() | dict(filter(None, [config.eval_source()]))
        if misplaced := [(name, _not_a_place(source)) for name, source in sources.items() if not _is_a_place(source)]:
            return Checked(errors=misplaced)
        names = ", ".join(dict.fromkeys(source.path[:200] for source in sources.values()))
        detail = (
            f"Reading the dataset {names} took longer than {timeout_s:g} s, with the wait for other checks. If it is "
            "being downloaded, submit again later; otherwise raise HEADRACE_DATASET_CHECK_TIMEOUT_S."
        )
        return await checked_in_thread(
            "dataset_name",
            lambda: judge_dataset(config, self._dataset_check(config), steps_before=steps_before),
            timeout_s=timeout_s,
            too_slow=Checked(problem=Problem(503, "Dataset not checked", detail, headers={"Retry-After": "30"})),
            places=self._reading,
        )

    async def _check_rewards(self, config: RunConfig) -> Checked:
        needs = await check_rewards(
            config,
            rewarder_url=self._settings.rewarder_url,
            api_key=self._settings.api_key.get_secret_value(),
            timeout_s=self._settings.reward_check_timeout_s,
            tls=PeerTls(self._settings.tls_ca_file),
        )
        return Checked(needs=needs)

    async def _check_tools(self, config: RunConfig) -> Checked:
        if config.is_agentic:
            await check_tools(
                config,
                sessions_url=self._settings.sessions_url,
                api_key=self._settings.api_key.get_secret_value(),
                timeout_s=self._settings.tool_check_timeout_s,
                tls=PeerTls(self._settings.tls_ca_file),
            )
        return Checked()

    async def _check_engine(self, config: RunConfig) -> Checked:
        if self._engine_check is None or not config.asks_for_more_of_vllm():
            return Checked()
        verdict = await self._engine_check(config)
        return Checked(
            errors=[(problem.field, problem.message) for problem in verdict.errors], warnings=verdict.warnings
        )


async def _answered(check: Awaitable[Checked]) -> Checked:
    """Return the result of a check by another service. Its refusal, or its absence, becomes part of the result."""
    try:
        return await check
    except Problem as error:
        if error.status == 422:
            return Checked(errors=[(item["field"], item["message"]) for item in error.body["errors"]])
        return Checked(problem=error)
    except UnavailableError as error:
        return Checked(problem=error)


def _parse(raw: Any) -> RunConfig:
    if not isinstance(raw, dict):
        raise invalid_run([("", 'a run is a JSON object of settings, such as {"model": ..., "dataset_name": ...}')])
    if len(cast("dict[str, Any]", raw)) > _MAX_KEYS:
        # Bounded, because each unknown key is compared with every known one.
        num_known = len(RunConfig.model_fields)
        raise invalid_run([("", f"there are {num_known} settings; this run names more than {_MAX_KEYS}")])
    try:
        return parse_run_config(raw)
    except UserError as error:
        raise invalid_run(error.problems or [(error.field or "", str(error))]) from error


def _is_a_place(source: DatasetSource) -> bool:
    return source.path.startswith("/") or (not source.is_file and is_hub_id(source.path))


def _not_a_place(source: DatasetSource) -> str:
    return (
        f"{source.path[:200]!r} is neither an absolute path nor a Hugging Face id. The trainer cannot "
        "resolve a relative path: give the absolute one (`headrace submit` makes it absolute for you)"
    )


def _missing_columns(needs: list[RewardNeeds], columns: list[str], *, of: str, fails: str) -> list[str]:
    return [
        f"the reward function {need.name} asks for the column {missing}, which the {of} does not have: it will fail "
        f"{fails}. Add the column, give the value in reward_kwargs, or give the argument a default"
        for need in needs
        for missing in need.missing(columns)
    ]


def check_group_size(config: RunConfig) -> list[tuple[str, str]]:
    """Return (setting, message) if a prompt group with the longest completions is too large for a Redis entry, else [].

    Such a group would be buried.
    """
    num_rollouts = max(config.num_generations, config.num_generations_eval or 0)
    of_prompts = (config.max_prompt_length or 0) * _BYTES_PER_PROMPT_TOKEN
    of_completions = config.max_completion_length * _BYTES_PER_TOKEN
    num_bytes = num_rollouts * (of_prompts + of_completions)
    if num_bytes <= MAX_MESSAGE_BYTES:
        return []
    longest = max(1, (MAX_MESSAGE_BYTES // num_rollouts - of_prompts) // _BYTES_PER_TOKEN)
    return [
        (
            "max_completion_length",
            f"a group of {num_rollouts} completions of {config.max_completion_length} tokens may take "
            f"{num_bytes / 2**20:.1f} MiB, more than the {MAX_MESSAGE_BYTES >> 20} MiB of an entry in Redis: lower "
            f"max_completion_length to at most {longest}, or lower num_generations",
        )
    ]


def unread_options(config: RunConfig) -> list[str]:
    """Return a warning for each option that was set without effect, such as ``num_train_epochs`` with ``max_steps``.

    ``config`` is as submitted, so that its ``model_fields_set`` has only options that the user set.
    """
    return [f"{name} has no effect: {reason}" for name, reason in _unread(config) if name in config.model_fields_set]


def _unread(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not set(config.report_to) - {"tensorboard"}:
        yield "project", "only trackers use it, and report_to has none, or only tensorboard"
    if config.logging_steps != 1 and not config.report_to and not config.log_completions:
        yield (
            "logging_steps",
            "only report_to and log_completions use it, and neither is set; the run's own log has every step",
        )
    if config.max_steps > 0:
        yield "num_train_epochs", f"max_steps={config.max_steps} determines the length of the run"
    if config.lr_scheduler_type == "constant_with_warmup" and config.warmup_steps == 0:
        yield "lr_scheduler_type", "constant_with_warmup without warmup_steps is constant; set warmup_steps"
    if config.eval_source() is None:
        yield "max_eval_prompts", "the run has no evaluation data; set eval_dataset_name or dataset_test_split"
