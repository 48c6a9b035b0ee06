"""The reward functions of a script: the columns that they ask for, and the error when they fail in the services.

A run whose rewards fail too often pauses and waits until they are mended. A script that waits cannot mend its own.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client import HeadraceApiError, HeadraceClient, Run
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.function_source import plain_name
from headrace.grpo.script_check import columns_of
from services.rewarder.reward_call import required_columns
from shared.errors import HeadraceError


class OwnRewards:
    """The script's own functions among the rewards of a run.

    Args:
        given: The trainer's ``reward_funcs``.
        settings: The run's settings, with the names that the functions have there.
    """

    def __init__(self, given: Sequence[Any], settings: Mapping[str, Any]) -> None:
        names: Sequence[str] = settings.get("reward_funcs", ())
        pairs = zip(names, given, strict=True) if len(names) == len(given) else ()
        self._settings = settings
        self._functions = {name: it for name, it in pairs if ":" in name and not isinstance(it, str)}
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
            for name, function in self._functions.items()
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
            HeadraceError: It is paused because a function of the script fails.
        """
        pause = run.get("pause")
        if run["status"] != "paused" or pause is None or pause["by"] != "rewards":
            return
        name = pause["reward_func"]
        if name in self._functions and pause["since_s"] != self._known_pause:
            raise HeadraceError(
                f"the reward function {self._plain(name)} failed for {pause['failed_ratio']:.0%} of the completions; "
                f"the last failure is: {pause['last_failure']}. Mend the function, and call "
                "train(resume_from_checkpoint=True)"
            )

    def _plain(self, name: str) -> str:
        return plain_name(self._functions[name], otherwise=name.rpartition(":")[2])
