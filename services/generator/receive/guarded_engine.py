"""Wraps the engine calls of a weight push, so that each has a deadline and fails with a readable error.

    weight_swap.py --> GuardedEngine --> ReceivingEngine (engine/receiving_engine.py)

Some calls leave the engine in an unknown state when they fail, and a worker that is stuck in a call cannot be recalled.
Both are fatal: only a new process helps, and ``on_fatal`` is called. After ``close`` it is not called, because the run
is over and the results of its last calls cannot affect the next run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from services.generator.engine.engine_failure import root_cause
from services.generator.engine.output_gate import compare
from services.generator.engine.receiving_engine import ReceivingEngine, Sleeper
from services.generator.worker.worker_reports import IDLE, RECEIVING, Progress
from shared.control import BeginRequest, CommitRequest, JoinRequest, Probe, ReplicaInfo
from shared.errors import PushError, UnavailableError
from shared.lineage import LineageVersion

_CALL_TIMEOUT_S = 60.0
"""Deadline of calls that move no weights, in seconds."""
_POLL_S = 0.05
"""How often workers that do not report by themselves are asked for their progress, in seconds."""
_STOPPED_S = 2.0
"""A pause between two polls that is longer than this means that the process was stopped; load does not cause it."""
_ResultT = TypeVar("_ResultT")


class GuardedEngine:
    """An engine that either answers in time or is given up.

    Args:
        keep_cache: Whether running requests keep their KV cache during a push.
        grace_s: How far a call may exceed its own deadline before the engine counts as stuck, in seconds.
        on_fatal: Called with the reason once the engine cannot be used any more; not called after ``close``.

    Attributes:
        is_stuck: Whether the engine cannot be used any more.

    Calls raise PushError on failure, and UnavailableError if it is fatal; ``compare_probe`` returns the reason instead.
    """

    def __init__(
        self, engine: ReceivingEngine, *, keep_cache: bool, grace_s: float, on_fatal: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._keep_cache = keep_cache
        self.grace_s = grace_s
        self._on_fatal = on_fatal
        self._is_closed = False
        self.is_stuck = False

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released some of its memory."""
        return isinstance(self._engine, Sleeper) and self._engine.is_asleep

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are pushed, instead of whole models."""
        return self._engine.adapter is not None

    def describe(self, replica: ReplicaInfo, *, run_id: str, model: str, dtype: str) -> ReplicaInfo:
        """Return a copy of ``replica`` with the fields that describe this engine and its run.

        Each call returns another ``engine_id``, by which the trainer recognises a restarted engine.
        """
        transports = list(self._engine.transports)
        # A simulated engine can do without torch, which takes seconds to import.
        torch_version, nccl_version = ("", None) if transports == ["simulated"] else _releases()
        engine = {
            "run_id": run_id,
            "model": model,
            "dtype": dtype,
            "transports": transports,
            "torch_version": torch_version,
            "nccl_version": nccl_version,
            "num_workers": self._engine.num_workers,
            "device_uuid": self._engine.device_uuid,
            "engine_id": uuid4().hex,
        }
        return replica.model_copy(update=engine)

    def close(self) -> None:
        """Stop using the engine, and report no more fatal failures."""
        self._is_closed = True
        self._engine.close()

    async def enter(self, body: JoinRequest) -> None:
        """Have every worker enter the trainer's communicator. Decoding continues."""
        what = "entering the communicator"
        where = body.model_dump(exclude={"run_id", "epoch"})
        await self._call(what, self._engine.call_workers("enter", where=where))
        await self._until({IDLE}, what, timeout_s=body.timeout_s)

    async def begin(self, body: BeginRequest, *, is_staged: bool, directory: Path | None) -> None:
        """Have every worker check the announced parameters and begin to receive them.

        Without staging, decoding must be paused, because the parameters go into the model itself. ``directory`` is for
        adapters; None if whole models arrive.
        """
        what: dict[str, Any] = body.model_dump(exclude={"run_id", "epoch", "policy_version"})
        what["staging"] = is_staged
        what["adapter"] = None
        if directory is not None and self._engine.adapter is not None:
            what["adapter"] = {"directory": str(directory), "config": self._engine.adapter.peft_config()}
        await self._call("beginning to receive", self._engine.call_workers("receive", what=what))
        await self._until({IDLE, RECEIVING}, "receiving weights", timeout_s=body.timeout_s)

    async def received(self, body: BeginRequest) -> str | None:
        """Wait for the last byte, and return the checksum of the received weights; None if no worker computed it."""
        found = await self._until({IDLE}, "receiving weights", timeout_s=body.timeout_s)
        checksums = {progress.checksum for progress in found}
        if len(checksums) > 1:
            raise PushError("the workers of this replica did not receive the same weights")
        return next(iter(checksums), None)

    async def check_received(self, checksum: str | None, body: CommitRequest) -> None:
        """Discard the received weights and raise PushError, if their checksum is not the trainer's.

        If either checksum is missing, nothing is compared.
        """
        if body.checksum is not None and checksum is not None and checksum != body.checksum:
            await self.forget()
            raise PushError(
                f"policy version {body.policy_version} as received is not what the trainer sent: the checksum is "
                f"{checksum}, but should be {body.checksum}"
            )

    async def forget(self) -> None:
        """Have every worker discard the received weights."""
        await self._call("discarding the received weights", self._engine.call_workers("forget"))

    async def pause(self) -> None:
        """Pause decoding; requests stay in flight."""
        await self._call("holding decoding", self._engine.pause(keep_cache=self._keep_cache))

    async def load(self, version: LineageVersion, *, directory: Path | None, timeout_s: float) -> None:
        """Load the received weights, or the adapter in ``directory``, as this version. Decoding must be paused."""
        if directory is None:
            await self._call("loading the weights", self._engine.call_workers("load"), timeout_s=timeout_s)
        else:
            await self._call("loading the adapter", self._engine.load_adapter(directory), timeout_s=timeout_s)
        label = str(version)
        await self._call("naming the version", self._engine.name_version(label), is_fatal=True)
        read_back = await self._call("reading the version back", self._engine.read_version(), is_fatal=True)
        if read_back != label:
            raise self._die(f"policy version {label} was loaded, but the engine reports {read_back}")

    async def resume(self) -> None:
        """Resume decoding, and take back the cache's memory first if it was released."""
        if isinstance(self._engine, Sleeper) and self._engine.is_asleep:
            await self._call("taking back the cache's memory", self._engine.wake("kv_cache"), is_fatal=True)
        await self._call("resuming decoding", self._engine.resume(), is_fatal=True)

    async def sleep(self) -> None:
        """Pause decoding, and release the GPU memory of weights and KV cache until the next push."""
        if not isinstance(self._engine, Sleeper):
            raise PushError("this engine cannot sleep")
        await self._call("going to sleep", self._engine.sleep(), is_fatal=True)

    async def wake_weights(self) -> None:
        """Take back the memory of the weights if it was released. Its content is undefined."""
        if isinstance(self._engine, Sleeper) and self._engine.is_asleep:
            await self._call("taking back the weights' memory", self._engine.wake("weights"), is_fatal=True)

    async def submit_probe(self, token_ids: Sequence[int]) -> "asyncio.Future[list[list[float]]]":
        """Queue a probe ahead of all requests, and return a future of its logprobs.

        The result has one list for each data-parallel engine. Cancelling the future gives the probe up.
        """
        return asyncio.ensure_future(await self._call("submitting the probe", self._engine.submit_probe(token_ids)))

    async def compare_probe(
        self, probe: Probe | None, answer: Awaitable[list[list[float]]] | None
    ) -> tuple[float | None, str | None]:
        """Wait for the answer to a probe, and compare it with the trainer's.

        Returns the largest difference in nats, and why the weights must not be served; each is None if there is none.
        """
        if probe is None or answer is None:
            return None, None
        try:
            async with asyncio.timeout(probe.timeout_s):
                return compare(probe, await answer)
        except TimeoutError:
            return None, f"the engine did not score the probe within {probe.timeout_s:.0f} s"
        except Exception as error:  # noqa: BLE001  as in _call
            return None, f"scoring the probe failed: {_why(error)}"

    async def abort_and_pause(self) -> None:
        """Abort every request, and pause decoding."""
        await self._call("aborting all requests", self._engine.abort_and_pause(), is_fatal=True)

    async def leave(self) -> None:
        """Have every worker leave the communicator, and stop receiving."""
        what = "leaving the communicator"
        await self._call(what, self._engine.call_workers("leave"), is_fatal=True)
        await self._until({IDLE}, what, timeout_s=0.0, is_failure_expected=True)

    async def _until(
        self, phases: set[str], what: str, *, timeout_s: float, is_failure_expected: bool = False
    ) -> Sequence[Progress]:
        """Wait until every worker is in one of ``phases``, and return the progress of all workers.

        Raises:
            PushError: A worker reported a failure, unless ``is_failure_expected``.
            UnavailableError: It took longer than ``timeout_s`` and ``grace_s`` together, which is fatal.
        """
        deadline = time.monotonic() + timeout_s + self.grace_s
        while True:
            asked_at = time.monotonic()
            found = await self._call(what, self._engine.progress(wait_s=_POLL_S))
            failures = [progress.failure for progress in found if progress.failure is not None]
            if failures and not is_failure_expected:
                raise PushError(f"{what} failed: {failures[0]}")
            if all(progress.phase in phases for progress in found):
                return found
            if (stood_still_s := time.monotonic() - asked_at) > _STOPPED_S:
                # This process was stopped, and its workers too. They notice only now that their own deadlines have
                # passed.
                deadline += stood_still_s
            if time.monotonic() > deadline:
                raise self._die(f"{what} did not end within {timeout_s + self.grace_s:.0f} s")

    async def _call(
        self,
        what: str,
        call: Coroutine[Any, Any, _ResultT],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        is_fatal: bool = False,
    ) -> _ResultT:
        try:
            async with asyncio.timeout(timeout_s + self.grace_s):
                return await call
        except TimeoutError as error:
            raise self._die(f"{what} did not end within {timeout_s + self.grace_s:.0f} s") from error
        except Exception as error:  # vLLM raises a bare Exception for any failure in a worker
            reason = f"{what} failed: {_why(error)}"
            if is_fatal:
                raise self._die(reason) from error
            raise PushError(reason) from error

    def _die(self, reason: str) -> UnavailableError:
        self.is_stuck = True
        if not self._is_closed:
            self._on_fatal(reason)
        return UnavailableError(reason)


def _why(error: Exception) -> str:
    """Return the root cause if the engine has died (its client reports only that it died), else the error's message."""
    return root_cause(otherwise=str(error) or type(error).__name__)


def _releases() -> tuple[str, str | None]:
    """Import torch, and return its version with its build, and the version of its NCCL (None without CUDA)."""
    import torch

    if torch.version.cuda is None:
        return str(torch.__version__), None
    cuda: Any = torch.cuda  # partly untyped
    return str(torch.__version__), ".".join(map(str, cuda.nccl.version()))
