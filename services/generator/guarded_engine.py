"""The engine calls of a weight push, each with a deadline and each error a sentence.

Some calls leave the engine neither in an update nor out of it when they fail, and a worker that is stuck in any of them
cannot be recalled. Both are fatal: only a new process helps, and whoever owns this one is told. After ``close`` nobody
is: the run is over, and what its last calls come to is no concern of the next one's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.generator.engine_failure import root_cause
from services.generator.receiving_engine import ReceivingEngine, Sleeper
from services.generator.worker_reports import Progress
from shared.control import BeginRequest, JoinRequest, Transport
from shared.errors import PushError, UnavailableError
from shared.lineage import LineageVersion

_CALL_TIMEOUT_S = 60.0
"""Deadline of calls that move no weights."""
_POLL_S = 0.05
"""How often workers are asked how far they are if they do not say so themselves."""
_STOPPED_S = 2.0
"""A pause between two questions that no poll takes, and no load."""
_IDLE, _RECEIVING = "idle", "receiving"
_ResultT = TypeVar("_ResultT")


class GuardedEngine:
    """An engine that either answers in time or is given up.

    Args:
        engine: The real one.
        keep_cache: Whether running requests keep their keys and values over a push.
        grace_s: How long past its own deadline a call may take before the engine counts as stuck.
        on_fatal: Told why, once nothing can be done with the engine any more; not after ``close``.

    Every call raises PushError if it failed, and UnavailableError if that was fatal.
    """

    def __init__(
        self, engine: ReceivingEngine, *, keep_cache: bool, grace_s: float, on_fatal: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._keep_cache = keep_cache
        self._grace_s = grace_s
        self._on_fatal = on_fatal
        self._is_closed = False
        self._is_stuck = False

    @property
    def transports(self) -> list[Transport]:
        """What its workers can receive over."""
        return list(self._engine.transports)

    @property
    def num_workers(self) -> int:
        """How many ranks it takes in a communicator."""
        return self._engine.num_workers

    @property
    def device_uuid(self) -> str | None:
        """Of its GPU; None if it has none, or several."""
        return self._engine.device_uuid

    @property
    def is_asleep(self) -> bool:
        """Whether some of its memory is given away."""
        return isinstance(self._engine, Sleeper) and self._engine.is_asleep

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can be done with it any more."""
        return self._is_stuck

    def close(self) -> None:
        """Ask nothing of it from now on."""
        self._is_closed = True
        self._engine.close()

    async def enter(self, body: JoinRequest) -> None:
        """Have every worker enter the trainer's communicator. Decoding goes on."""
        what = "entering the communicator"
        await self._workers(what, "enter", where=body.model_dump(exclude={"run_id", "epoch"}))
        await self._until({_IDLE}, what, timeout_s=body.timeout_s)

    async def begin(self, body: BeginRequest, *, is_staged: bool, directory: Path | None) -> None:
        """Have every worker check what is announced, and begin to receive it.

        Args:
            body: What the trainer announced.
            is_staged: Into staging memory; otherwise into the model itself, and decoding must be held.
            directory: Where adapters go.
        """
        what: dict[str, Any] = body.model_dump(exclude={"run_id", "epoch", "policy_version"})
        what["staging"] = is_staged
        what["adapter"] = None
        if directory is not None and self._engine.adapter is not None:
            what["adapter"] = {"directory": str(directory), "config": self._engine.adapter.peft_config()}
        await self._workers("beginning to receive", "receive", what=what)
        await self._until({_IDLE, _RECEIVING}, "receiving weights", timeout_s=body.timeout_s)

    async def received(self, body: BeginRequest) -> str | None:
        """Wait for the last byte, and return the checksum of what arrived; None if nobody computed it."""
        found = await self._until({_IDLE}, "receiving weights", timeout_s=body.timeout_s)
        checksums = {progress.checksum for progress in found}
        if len(checksums) > 1:
            raise PushError("the workers of this replica did not receive the same weights")
        return next(iter(checksums), None)

    async def forget(self) -> None:
        """Have every worker forget what it has staged."""
        await self._workers("forgetting what was received", "forget")

    async def hold(self) -> None:
        """Hold decoding; requests stay in flight."""
        await self._call("holding decoding", self._engine.pause(keep_cache=self._keep_cache))

    async def load(self, version: LineageVersion, *, directory: Path | None, timeout_s: float) -> None:
        """Put what was received to use, under this version. Decoding must be held."""
        if directory is None:
            await self._call("loading the weights", self._engine.call_workers("load"), timeout_s=timeout_s)
        else:
            await self._call("loading the adapter", self._engine.load_adapter(directory), timeout_s=timeout_s)
        label = str(version)
        await self._call("naming the version", self._engine.name_version(label), is_fatal=True)
        read_back = await self._call("reading the version back", self._engine.read_version(), is_fatal=True)
        if read_back != label:
            raise self._die(f"policy version {label} was loaded, the engine says {read_back}")

    async def resume(self) -> None:
        """Go on decoding, with the cache's memory if that was given away."""
        if isinstance(self._engine, Sleeper) and self._engine.is_asleep:
            await self._call("taking the cache's memory back", self._engine.wake("kv_cache"), is_fatal=True)
        await self._call("going on", self._engine.resume(), is_fatal=True)

    async def sleep(self) -> None:
        """Give the engine's memory away."""
        if not isinstance(self._engine, Sleeper):
            raise PushError("this engine cannot sleep")
        await self._call("going to sleep", self._engine.sleep(), is_fatal=True)

    async def wake_weights(self) -> None:
        """Take the memory of the weights back, if it was given away; what is in it is nothing yet."""
        if isinstance(self._engine, Sleeper) and self._engine.is_asleep:
            await self._call("taking the weights' memory back", self._engine.wake("weights"), is_fatal=True)

    async def submit_probe(self, token_ids: Sequence[int]) -> "asyncio.Task[list[list[float]]]":
        """Queue a probe; see ReceivingEngine. Cancelling the answer gives the probe up."""
        answer = await self._call("submitting the probe", self._engine.submit_probe(token_ids))
        return asyncio.create_task(_wait(answer), name="answer to the probe")

    async def probed(self, answer: Awaitable[list[list[float]]], *, timeout_s: float) -> list[list[float]]:
        """Return the answer to a probe."""
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise PushError(f"the engine did not score the probe within {timeout_s:.0f} s") from error
        except Exception as error:  # as in _call
            raise PushError(f"scoring the probe failed: {_why(error)}") from error

    async def abort_and_hold(self) -> None:
        """Abort every request, and hold decoding."""
        await self._call("aborting all requests", self._engine.abort_and_pause(), is_fatal=True)

    async def leave(self) -> None:
        """Have every worker leave the communicator; what it was receiving is given up."""
        what = "leaving the communicator"
        await self._workers(what, "leave", is_fatal=True)
        await self._until({_IDLE}, what, timeout_s=0.0, is_failure_expected=True)

    async def _until(
        self, phases: set[str], what: str, *, timeout_s: float, is_failure_expected: bool = False
    ) -> Sequence[Progress]:
        """Follow all workers until each is in one of ``phases``."""
        deadline = time.monotonic() + timeout_s + self._grace_s
        while True:
            asked_at = time.monotonic()
            found = await self._call(what, self._engine.progress(wait_s=_POLL_S))
            failures = [progress.failure for progress in found if progress.failure is not None]
            if failures and not is_failure_expected:
                raise PushError(f"{what} failed: {failures[0]}")
            if all(progress.phase in phases for progress in found):
                return found
            if (stood_still_s := time.monotonic() - asked_at) > _STOPPED_S:
                # This process was stopped, and its workers with it: they too find out only now that time is up.
                deadline += stood_still_s
            if time.monotonic() > deadline:
                raise self._die(f"{what} did not end within {timeout_s + self._grace_s:.0f} s")

    async def _workers(self, what: str, move: str, /, *, is_fatal: bool = False, **arguments: Any) -> list[Any]:
        return await self._call(what, self._engine.call_workers(move, **arguments), is_fatal=is_fatal)

    async def _call(
        self,
        what: str,
        call: Coroutine[Any, Any, _ResultT],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        is_fatal: bool = False,
    ) -> _ResultT:
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                return await call
        except TimeoutError as error:
            raise self._die(f"{what} did not end within {timeout_s + self._grace_s:.0f} s") from error
        except Exception as error:  # vLLM raises a bare Exception for whatever failed in a worker
            reason = f"{what} failed: {_why(error)}"
            if is_fatal:
                raise self._die(reason) from error
            raise PushError(reason) from error

    def _die(self, reason: str) -> UnavailableError:
        self._is_stuck = True
        if not self._is_closed:
            self._on_fatal(reason)
        return UnavailableError(reason)


def _why(error: Exception) -> str:
    """Return what an engine died of, where it has died: its client only says that it did."""
    return root_cause(otherwise=str(error) or type(error).__name__)


async def _wait(answer: Awaitable[_ResultT]) -> _ResultT:
    return await answer
