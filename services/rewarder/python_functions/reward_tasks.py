"""Tells worker processes how to load, call and describe reward functions."""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from services.rewarder.built_ins.built_in_rewards import built_in, check_name
from services.rewarder.built_ins.time_limit import call_deadline
from services.rewarder.logged_values import LoggedValues
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import (
    CallError,
    RewardCall,
    RewardFunction,
    arguments_for,
    everyone,
    judge,
    refused_kwargs,
    required_columns,
    with_logged,
)
from services.rewarder.sandbox.chosen import SandboxChoice, choose
from shared.user_code.error_text import origin_of, printable, users_trace
from shared.user_code.function_loading import is_async, load_function, read_function
from shared.user_code.limits import Limits, is_out_of_memory
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused
from shared.user_code.worker_pool import WorkerPool

RewardPool = WorkerPool[Answer, Inspected]


class RewardTasks(msgspec.Struct, frozen=True):
    """The tasks of reward workers: call a synchronous reward function, or import a function and describe it.

    ``places`` are the directories and packages that users' modules may come from. ``sandbox`` runs generated code.
    """

    places: Places = Places()
    sandbox: SandboxChoice = SandboxChoice()

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that are imported once for all workers: this module and the built-in reward in accuracy.py."""
        return __name__, "services.rewarder.built_ins.accuracy"

    @property
    def answer_type(self) -> type[Answer]:
        """The type of a call's answer, with which the worker's reply is decoded."""
        return Answer

    @property
    def description_type(self) -> type[Inspected]:
        """The type of a function's description, with which the worker's reply is decoded."""
        return Inspected

    def set_up(self) -> None:
        """Set the sandbox for generated code in this worker process."""
        choose(self.sandbox)

    def load(self, name: str, sources: Sources | None) -> RewardFunction:
        """Return a built-in, or a user's function from the version ``sources`` (the current files if None).

        Raises:
            UserError: The function cannot be loaded.
            BaseException: An exception of the user's module.
        """
        check_name(name)
        known = built_in(name)
        return load_function(name, places=self.places, sources=sources) if known is None else known.load()

    def read(self, name: str) -> tuple[RewardFunction, Sources | None]:
        """Return a built-in and None, or a user's function from its current files and their version.

        Raises:
            UserError: The function cannot be loaded.
            BaseException: An exception of the user's module.
        """
        check_name(name)
        known = built_in(name)
        return read_function(name, places=self.places) if known is None else (known.load(), None)

    def call(self, name: str, function: RewardFunction, call: msgspec.Raw, limits: Limits) -> Answer:
        """Call a function with the RewardCall in ``call`` (msgpack). Its exceptions become ``error`` verdicts."""
        rows = msgspec.msgpack.decode(call, type=RewardCall)
        num_completions = len(rows.completions)
        known = built_in(name)
        if known is not None and (why_not := known.why_not(rows.reward_kwargs.get(name, {}))):
            return Answer(everyone(num_completions, "error", why_not))
        try:
            options, logged = () if known is None else known.not_from_columns(), LoggedValues()
            arguments = arguments_for(
                function,
                rows,
                name=name,
                is_built_in=known is not None,
                options=options,
                may_be_given=None if known is None else known.options,
                logged=logged,
            )
            with call_deadline(rows.timeout_s):
                returned = function(**arguments)
            return Answer(with_logged(judge(returned, num_completions, is_built_in=known is not None), logged))
        except CallError as error:
            return Answer(everyone(num_completions, "error", str(error)))
        except BaseException as error:  # noqa: BLE001  user code; math-verify's own timeout is not an Exception either
            verdicts = everyone(num_completions, "error", limits.describe(error))
            is_full = is_out_of_memory(error)
            return Answer(verdicts, users_trace(error), origin=origin_of(error), is_out_of_memory=is_full)

    def describe(
        self, name: str, function: RewardFunction, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> Inspected | Refused:
        """Return a function's kind, summary and required columns, or Refused if it cannot be used with ``kwargs``."""
        known = built_in(name)
        why_not = known.why_not_usable(kwargs) if known else refused_kwargs(function, kwargs)
        if why_not is not None:
            return Refused(f"{name} {why_not}")
        if known is not None:
            return Inspected("built-in", known.summary, [list(columns) for columns in known.columns])
        return Inspected(
            "async" if is_async(function) else "sync",
            printable((inspect.getdoc(function) or "").partition("\n")[0]),
            [[column] for column in required_columns(function)],
            sources,
            "" if sources is None else sources.version,
        )
