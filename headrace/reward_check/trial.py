"""Runs one reward function on groups as the rewarder would: with its workers, event loop, deadlines and outcomes.

named function --inspect--> its kind and version
groups, all at once --Scorer--> one outcome for each completion

A function that hangs, crashes or returns nonsense behaves here as it would in a run.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from headrace.local.service_specs import importable_environment
from headrace.reward_check.row_groups import RowGroup
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from services.rewarder.settings import MIB, WorkerSettings
from shared.arrays import pack_ids
from shared.errors import UserError
from shared.messages import RewardOutcome
from shared.settings import from_environment
from shared.user_code.limits import Limits
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused

LANE = "check"
MAX_COMPLETION_LENGTH = 512
"""A run's default, in token ids. Without a tokenizer, the ids here are UTF-8 bytes."""
SAY_AFTER_S = 4.0
"""Seconds of silence after which a message says what the command waits for."""


@dataclass(frozen=True)
class Trial:
    """The result of trying a function.

    Args:
        inspected: The function's kind, version and needs.
        outcomes: For each group, one outcome for each completion.
        said: The messages with a stack trace that the rewarder would log.
        is_ended: Whether all calls have ended; an async function may ignore its cancellation.
    """

    inspected: Inspected
    outcomes: tuple[tuple[RewardOutcome, ...], ...]
    said: tuple[str, ...]
    is_ended: bool


async def try_function(
    name: str,
    groups: Sequence[RowGroup],
    *,
    places: Places,
    timeout_s: float,
    kwargs: Mapping[str, Any] | None = None,
    say: Callable[[str], None],
) -> Trial:
    """Score all groups at the same time, with ``kwargs`` as the function's ``reward_kwargs`` of a run.

    ``say`` is called when something takes long. It may be called from any thread.

    Raises:
        UserError: The function does not exist, cannot be imported, or does not accept these arguments; or a HEADRACE_
            variable for workers has a wrong value.
    """
    settings = from_environment(WorkerSettings)
    num_workers = min(len(groups), max(2, os.cpu_count() or 1))
    limits = Limits(settings.worker_memory_mib * MIB, settings.worker_open_files)
    metrics = RewarderMetrics()
    loop_functions = LoopFunctions(places=places, import_timeout_s=settings.import_timeout_s)
    with _Heard() as heard, _environment_of_a_service():
        async with RewardPool(
            RewardTasks(places, settings.choice_for(num_workers)),
            num_workers=num_workers,
            limits=limits,
            queue_timeout_s=(timeout_s + settings.import_timeout_s) * len(groups),
            import_timeout_s=settings.import_timeout_s,
            metrics=metrics,
        ) as pool:
            functions = PythonFunctions(
                pool,
                loop_functions=loop_functions,
                import_timeout_s=settings.import_timeout_s,
                check_timeout_s=settings.import_timeout_s,
            )
            try:
                with _told(f"waiting for {name} to be imported, {settings.import_timeout_s:g} s at most", say):
                    inspected = await functions.inspect(name, kwargs)
                if isinstance(inspected, Refused):
                    raise UserError(inspected.detail)
                calls = [_call(group, {name: dict(kwargs or {})}) for group in groups]
                scorer = Scorer(functions, metrics=metrics)
                with _told(f"waiting for {name} to score {_rows(calls)}, {timeout_s:g} s at most", say):
                    outcomes = await _score(scorer, name, calls, timeout_s)
            finally:
                await functions.close()
                is_ended = await loop_functions.close()
    return Trial(inspected, outcomes, tuple(heard.messages), is_ended)


@contextlib.contextmanager
def _environment_of_a_service() -> Generator[None]:
    """Set the environment variables of a service's process, so that workers do not import from the current directory.

    Otherwise even the standard library would import a `random.py` from there.
    """
    wanted = importable_environment()
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _told(what: str, say: Callable[[str], None]) -> Generator[None]:
    """Call ``say(what)`` if the block takes longer than 4 s.

    The call is made in another thread, so it also works while a reward function blocks the event loop.
    """
    timer = threading.Timer(SAY_AFTER_S, say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _rows(calls: Sequence[RewardCall]) -> str:
    return "1 row" if len(calls) == 1 else f"{len(calls)} rows, each"


async def _score(
    scorer: Scorer, name: str, calls: Sequence[RewardCall], timeout_s: float
) -> tuple[tuple[RewardOutcome, ...], ...]:
    function = [WeightedFunction(name)]
    rows_by_group = await asyncio.gather(
        *(scorer.score(call, function, timeout_s=timeout_s, lane=LANE) for call in calls)
    )
    return tuple(tuple(row[0] for row in rows) for rows in rows_by_group)


def _call(group: RowGroup, reward_kwargs: dict[str, dict[str, Any]]) -> RewardCall:
    is_conversational = not isinstance(group.prompt, str)
    return RewardCall(
        prompts=[group.prompt] * len(group.completions),
        completions=[
            [{"role": "assistant", "content": text}] if is_conversational else text for text in group.completions
        ],
        columns={name: [value] * len(group.completions) for name, value in group.columns.items()},
        completion_ids=[pack_ids(list(text.encode("utf-8", "replace"))) for text in group.completions],
        max_completion_length=MAX_COMPLETION_LENGTH,
        reward_kwargs=reward_kwargs,
    )


class _Heard(logging.Handler):
    """A log handler that keeps the rewarder's warnings that have a stack trace."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger("services.rewarder").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("services.rewarder").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message with a stack trace. The outcomes already contain the text of other messages."""
        message = record.getMessage().strip()
        if "\n" in message:
            self.messages.append(message)
