"""The life of a generator process with any engine, from its listening socket to its exit code.

After SIGTERM or SIGINT it takes no more prompts, aborts the groups in flight, gives its lease back, and exits within
ten seconds. The aborted groups stay pending in Redis under the replica's name, for its next process or another replica.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

from services.generator.receive.weight_receiver import WeightReceiver
from shared.errors import HeadraceError, UserError
from shared.serving.http_server import HttpServer

log = logging.getLogger(__name__)

_STOP_S = 8.0


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
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
    """Answer HTTP and do ``work`` until ``stop`` is set or something fails, and return the exit code.

    Args:
        stop: Set to end the process.
        server: Answers HTTP requests.
        listener: The socket that ``server`` listens on.
        work: Follows the current run; ends only with an exception.
        receivers: The process ends when the engine of any receiver is stuck.
        say_why: Called with the reason if the process ends because of a failure.

    Raises:
        UserError: A setting is wrong.
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
    # gather would cancel the tasks again after that time, and wait for them: a stuck engine may never be shut down.
    ended, _ = await asyncio.wait({http, *tasks}, timeout=_STOP_S)
    for task in ended:
        _failure_of(task)  # retrieved, so that asyncio does not log it
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
        log.critical("the generator failed with an unexpected error", exc_info=failure)
    return 1


def _reason(failure: BaseException) -> str:
    """Return the reason to report: a UserError first, then another HeadraceError, then the first unknown error."""
    known = [error for error in _leaves(failure) if isinstance(error, HeadraceError)]
    known.sort(key=lambda error: not isinstance(error, UserError))
    if known:
        return str(known[0])
    unknown = next(_leaves(failure))
    return f"{type(unknown).__name__}: {unknown}; see its log"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
