"""The life of a generator process, whatever samples in it: from its first byte on the wire to its exit code.

Asked to stop (SIGTERM, SIGINT) it takes no more prompts, aborts what is in flight, gives its lease back, and is gone
within ten seconds. What was in flight stays pending in Redis under its name, for its next life or for another replica.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

from services.generator.weight_receiver import WeightReceiver
from shared.errors import HeadraceError, UserError
from shared.serving.http_server import HttpServer

log = logging.getLogger(__name__)

_STOP_S = 8.0


def stop_on_signals() -> asyncio.Event:
    """Return an event that is set when this process is asked to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def serve_until(
    stop: asyncio.Event,
    *,
    server: HttpServer,
    listener: socket.socket,
    work: Coroutine[Any, Any, None],
    receivers: Sequence[WeightReceiver],
    say_why: Callable[[str], Awaitable[None]],
) -> int:
    """Answer HTTP and do ``work`` until asked to stop, and return the exit code.

    Args:
        stop: Ends it.
        server: Answers.
        listener: Where.
        work: Follows the current run; ends by failing alone.
        receivers: A stuck one ends the process.
        say_why: Told why it ends, if that is not because it was asked to.

    Raises:
        UserError: Something is set wrong.
    """
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    working = asyncio.create_task(work, name="run follower")
    alarms = [asyncio.create_task(receiver.fatal.wait(), name="weight alarm") for receiver in receivers]
    asked = asyncio.create_task(stop.wait(), name="stop signal")
    tasks: list[asyncio.Task[Any]] = [working, asked, *alarms]
    await asyncio.wait({http, *tasks}, return_when=asyncio.FIRST_COMPLETED)

    failure = _failure_of(working) or _failure_of(http)
    stuck = [receiver for receiver in receivers if receiver.fatal.is_set()]
    if failure is None and stuck:
        failure = HeadraceError(stuck[0].fatal_reason)
    server.should_exit = True
    for task in tasks:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await asyncio.gather(http, *tasks, return_exceptions=True)
    if failure is not None:
        await say_why(f"it ended, saying: {_reason(failure)}")
    return _exit_code(failure)


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _exit_code(failure: BaseException | None) -> int:
    if failure is None:
        return 0
    expected = [error for error in _leaves(failure) if isinstance(error, HeadraceError)]
    for error in expected:
        if isinstance(error, UserError):
            raise error
    if expected:
        log.critical("%s", expected[0])
    else:
        log.critical("the generator failed in a way nobody foresaw", exc_info=failure)
    return 1


def _reason(failure: BaseException) -> str:
    """Return what people are told: our sentence if there is one, a setting that is wrong before anything else."""
    known = [error for error in _leaves(failure) if isinstance(error, HeadraceError)]
    known.sort(key=lambda error: not isinstance(error, UserError))
    if known:
        return str(known[0])
    unknown = next(_leaves(failure))
    return f"{type(unknown).__name__}: {unknown}; its log says more"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
