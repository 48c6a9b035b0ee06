"""Checks a script's own reward functions, tools and environments for missing data columns and failures in a run.

A run pauses if rewards, tools or environments fail too often, and waits until they are repaired. A script that waits
for its run cannot repair its own code. So the failure is raised in the script instead.
"""

import contextlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from headrace.client import HeadraceApiError, HeadraceClient, Run
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.definitions import plain_name
from headrace.grpo.script import Script
from headrace.grpo.script_check import columns_of
from headrace.grpo.trainer_attributes import as_list
from services.rewarder.reward_call import required_columns
from shared.errors import HeadraceError


class OwnCode:
    """The script's own functions and classes among the reward functions, tools and environments of a run.

    Args:
        script: The trainer's arguments.
        settings: The run's settings, in which this code is named as ``module:function``.
    """

    def __init__(self, script: Script, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._reward_funcs = _own(settings.get("reward_funcs", ()), script.reward_funcs)
        self._tools = _own(settings.get("tools", ()), script.tools)
        self._environments = _own(*map(_factories, (settings.get("environment_factory"), script.environment_factory)))
        self._known_pause: float | None = None

    def check_columns(self, script: Script, client: HeadraceClient) -> None:
        """Check that the data of a training have every column that the script's reward functions ask for.

        Args:
            script: The trainer's arguments. If a column is not found in its data sets, the services check the data.
            client: A client of the run API.

        Raises:
            ArgumentError: A function asks for a column that ``train_dataset``, or ``eval_dataset`` if it is used, does
                not have.
        """
        self._check_columns(script.train_dataset, client, what="train_dataset", derived="columns")
        if "eval_dataset_name" in self._settings:
            self._check_columns(script.eval_dataset, client, what="eval_dataset", derived="eval_columns")

    def _check_columns(self, data: Any, client: HeadraceClient, *, what: str, derived: str) -> None:
        kwargs: Mapping[str, Mapping[str, Any]] = self._settings.get("reward_kwargs") or {}
        asked = [
            (name, column)
            for name, function in self._reward_funcs.items()
            for column in required_columns(function)
            if column not in kwargs.get(name, {})
        ]
        there = columns_of(data) or []
        if all(column in there for _, column in asked):
            return
        with contextlib.suppress(HeadraceApiError):  # the submit is refused for the same reason
            there = client.check(self._settings).derived.get(derived, [])
            for name, column in asked:
                if there and column not in there:
                    raise ArgumentError(
                        f"the reward function {self._plain(name)} asks for the column {column}, which {what} "
                        f"does not have; it has {', '.join(there)}. Add the column, or give the argument a default"
                    )

    def follow(self, run: Run) -> None:
        """Remember the run's present pause, so that ``check`` ignores it while the resumed run still reports it."""
        self._known_pause = (run.get("pause") or {}).get("since_s")

    def check(self, run: Run) -> None:
        """Check that a run is not paused because of the script's own code.

        Raises:
            HeadraceError: The script's code paused the run. The message has the last failure.
        """
        pause = run.get("pause")
        if run["status"] != "paused" or pause is None or pause["by"] != "rewards":
            return
        name, ratio = pause["reward_func"], pause["failed_ratio"]
        if name in self._reward_funcs:
            where = _place_of(self._reward_funcs[name])
            what = f"the reward function {self._plain(name)}{where} failed for {ratio:.0%} of the completions"
            mend = "function"
        elif not name and (self._tools or self._environments):
            what = f"{ratio:.0%} of the rollouts were lost"
            mend = " or ".join(self._played())
        else:
            return
        if pause["since_s"] != self._known_pause:
            raise HeadraceError(
                f"{what}; the last failure is: {self._plain(pause['last_failure'])}. Mend the {mend}, make the trainer "
                "again with it, and call train(resume_from_checkpoint=True)"
            )

    def _played(self) -> Iterable[str]:
        """Yield the kinds of the script's code that can lose rollouts: ``tools`` and ``environment``."""
        if self._tools:
            yield "tools"
        if self._environments:
            yield "environment"

    def _plain(self, text: str) -> str:
        """Replace each ``module:function`` of the script's code in a text by its name in the script."""
        for name, code in (self._reward_funcs | self._tools | self._environments).items():
            text = text.replace(name, plain_name(code, otherwise=name.rpartition(":")[2]))
        return text


def _place_of(function: Any) -> str:
    """Return a function's file and line for a message; empty for a partial, an object or code in a notebook cell."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not Path(code.co_filename).is_file():
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def check_evaluation(run: Run, metrics: Mapping[str, Any]) -> None:
    """Check that an evaluation has not lost too many rollouts, and that no reward function failed too often.

    Raises:
        HeadraceError: More than ``reward_failure_threshold`` of the rollouts were lost, or a reward function failed for
            more than this share of the completions.
    """
    config, lost = run["config"], metrics.get("eval_rollouts/lost") or 0.0
    num_rollouts = metrics["eval_groups/done"] * (config.get("num_generations_eval") or config["num_generations"])
    if lost > config["reward_failure_threshold"] * num_rollouts:
        raise HeadraceError(
            f"{lost / num_rollouts:.0%} of the rollouts of {run['run_id']}, the evaluation, were lost; the log of the "
            "sessions service has the failures of tools and environments. Mend them, or allow more with "
            "run_options={'reward_failure_threshold': SHARE}"
        )
    for name, ratio in metrics.items():
        function = name.removeprefix("eval_rewards/").removesuffix("/failed_ratio")
        is_ratio = name == f"eval_rewards/{function}/failed_ratio" and ratio is not None
        if is_ratio and ratio > config["reward_failure_threshold"]:
            raise HeadraceError(
                f"the reward function {function} failed for {ratio:.0%} of the completions of {run['run_id']}, the "
                "evaluation; the rewarder's log has the failures. Mend the function, or allow more with "
                "run_options={'reward_failure_threshold': SHARE}"
            )


def _own(names: Sequence[str], given: Sequence[Any]) -> dict[str, Any]:
    """Return a script's own functions and classes by their ``module:function`` names in the settings; nothing else."""
    pairs = zip(names, given, strict=True) if len(names) == len(given) else ()
    return {name: it for name, it in pairs if ":" in name and not isinstance(it, str)}


def _factories(environment_factory: Any) -> list[Any]:
    """Return a list of environment factories, from one factory, a dictionary of several by name, or None."""
    is_table = isinstance(environment_factory, Mapping)
    return as_list([*cast("Mapping[str, Any]", environment_factory).values()] if is_table else environment_factory)
