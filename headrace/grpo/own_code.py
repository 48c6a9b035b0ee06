"""The code of a script that the services call: the columns that it asks for, and the error when it fails there.

A run pauses if its rewards fail too often, or its tools and environments, and waits until they are mended. A script
that waits cannot mend its own.
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
        settings: The run's settings, with the names that the code has there.
    """

    def __init__(self, script: Script, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._reward_funcs = _own(settings.get("reward_funcs", ()), script.reward_funcs)
        self._tools = _own(settings.get("tools", ()), script.tools)
        self._environments = _own(*map(_factories, (settings.get("environment_factory"), script.environment_factory)))
        self._known_pause: float | None = None

    def check_columns(self, data: Any, client: HeadraceClient) -> None:
        """Compare the arguments of the functions with the columns of the training data.

        Args:
            data: The trainer's ``train_dataset``. If it does not show its columns, the services look.
            client: A client of the services.

        Raises:
            ArgumentError: A function asks for a column that is not there.
        """
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
            there = client.check(self._settings).derived.get("columns", [])
            for name, column in asked:
                if there and column not in there:
                    raise ArgumentError(
                        f"the reward function {self._plain(name)} asks for the column {column}, which train_dataset "
                        f"does not have; it has {', '.join(there)}. Add the column, or give the argument a default"
                    )

    def follow(self, run: Run) -> None:
        """Follow a run, and take no notice of the pause in which it may still be."""
        self._known_pause = (run.get("pause") or {}).get("since_s")

    def check(self, run: Run) -> None:
        """Look at the run that is followed.

        Raises:
            HeadraceError: It is paused because code of the script fails.
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
        """Yield what loses rollouts."""
        if self._tools:
            yield "tools"
        if self._environments:
            yield "environment"

    def _plain(self, text: str) -> str:
        """Return a text in which the script's code has its own names."""
        for name, code in (self._reward_funcs | self._tools | self._environments).items():
            text = text.replace(name, plain_name(code, otherwise=name.rpartition(":")[2]))
        return text


def _place_of(function: Any) -> str:
    """Return the file and line of a function, in brackets; empty for a partial, an object or a notebook's cell."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not Path(code.co_filename).is_file():
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def check_evaluation(run: Run, metrics: Mapping[str, Any]) -> None:
    """Look at the metrics of an evaluation.

    Raises:
        HeadraceError: More of the rollouts were lost, or a reward function has failed for more of the completions,
            than a training allows.
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
    """Return the code by its name in the settings, without what was given by name."""
    pairs = zip(names, given, strict=True) if len(names) == len(given) else ()
    return {name: it for name, it in pairs if ":" in name and not isinstance(it, str)}


def _factories(environment_factory: Any) -> list[Any]:
    """Return the factories of one environment, or of several by name."""
    is_table = isinstance(environment_factory, Mapping)
    return as_list([*cast("Mapping[str, Any]", environment_factory).values()] if is_table else environment_factory)
