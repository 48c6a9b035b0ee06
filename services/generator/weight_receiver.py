"""The receiving end of the weight push; weight_sender.py in the trainer has the diagram.

    serving --begin--> held, receiving --commit--> serving the new version
                             |
                             +-- anything fails, or abort --> held, in no communicator, until a later epoch's commit

Half-loaded weights are never served: after a failed update nothing but a complete later one resumes decoding. That also holds
when the trainer dies in the middle: this replica stays held until the trainer that takes over joins it to its own epoch.
A trainer that dies between pushes holds nothing up. Bodies of an older epoch, or of another run, are refused.

Every call into the engine has a deadline. A worker that is stuck in one cannot be recalled: ``fatal`` is set then, and the
process is expected to end and be started again.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from services.generator.vllm_plugin import GLOO_BACKEND, NCCL_BACKEND
from shared.control import (
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    ControlBody,
    JoinRequest,
    ReplicaInfo,
    Transport,
)
from shared.errors import HeadraceError, PushError, UnavailableError

log = logging.getLogger(__name__)

_TRANSPORTS: dict[str, Transport] = {GLOO_BACKEND: "gloo", NCCL_BACKEND: "nccl"}
_CALL_TIMEOUT_S = 60.0
"""Deadline of engine calls that move no weights: pause, resume, finish."""
_ResultT = TypeVar("_ResultT")


class ConflictError(PushError):
    """The body is of another run, of an older epoch, or out of turn."""


class ReceivingEngine(Protocol):
    """What the receiver needs of vLLM's AsyncLLM."""

    vllm_config: Any

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any: ...

    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    async def get_weight_version(self) -> str: ...


@dataclass
class _Update:
    """A push that began here and was neither committed nor given up."""

    epoch: int
    policy_version: int
    held_at: float
    receiving: "asyncio.Task[str | None]"
    received_at: float | None = None


class WeightReceiver:
    """What this replica holds, and the four moves of a push.

    Args:
        replica_id: This replica's stable name.
        grace_s: How long past its deadline the engine may take before it counts as stuck.

    Attributes:
        fatal: Set when the engine is stuck and the process must end.
        fatal_reason: Why, as a sentence.
    """

    def __init__(self, *, replica_id: str, grace_s: float = 10.0) -> None:
        self.fatal = asyncio.Event()
        self.fatal_reason = ""
        self._replica_id = replica_id
        self._grace_s = grace_s
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._engine: ReceivingEngine | None = None
        self._run_id: str | None = None
        self._model: str | None = None
        self._dtype: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._epoch = 0
        self._newest_epoch = 0
        self._policy_version = -1
        self._is_held = False
        self._update: _Update | None = None

    @property
    def policy_version(self) -> int:
        """Version read back from the engine; -1 if it holds none of this run's."""
        return self._policy_version

    @property
    def is_held(self) -> bool:
        """Whether decoding is held."""
        return self._is_held

    def attach(self, engine: ReceivingEngine, *, run_id: str, model: str, dtype: str) -> None:
        """Receive for ``run_id`` into ``engine``, which has just loaded ``model``."""
        self._engine, self._run_id, self._model, self._dtype = engine, run_id, model, dtype
        self._reset()
        self._notify()

    def detach(self) -> None:
        """Receive no more; the engine is about to go."""
        if self._update is not None:
            self._update.receiving.cancel()
        self._engine = self._run_id = self._model = self._dtype = None
        self._reset()
        self._notify()

    def is_open(self, required: int) -> bool:
        """Return whether prompts may be taken: some version of this run is held, and none older than ``required``."""
        return not self._is_held and self._policy_version >= max(required, 0)

    async def wait_open(self, required: int) -> None:
        """Wait until ``is_open(required)``. A push may take long to come, so the caller sets the deadline."""
        while not self.is_open(required):
            await self._changed.wait()

    def info(self) -> ReplicaInfo:
        """Return what this replica is and holds."""
        engine = self._engine
        transport = None if engine is None else _TRANSPORTS.get(_backend(engine))
        return ReplicaInfo(
            replica_id=self._replica_id,
            run_id=self._run_id,
            model=self._model,
            transports=[] if transport is None else [transport],
            torch_version=str(torch.__version__),
            nccl_version=_nccl_version(),
            num_workers=0 if engine is None else _num_workers(engine),
            dtype=self._dtype,
            epoch=self._epoch,
            policy_version=self._policy_version,
            is_held=self._is_held,
        )

    async def join(self, body: JoinRequest) -> ReplicaInfo:
        """Have all workers enter a new communicator.

        Raises:
            ConflictError: Another run, an epoch that is not newer, or versions that cannot talk to each other.
            PushError: The rendezvous failed.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        self._check_versions(body)
        async with self._lock:
            engine = self._check_run(body)
            if body.epoch <= self._newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
            self._newest_epoch = body.epoch
            await self._leave("a newer epoch began")
            init_info = _gloo_init_info(body) if body.transport == "gloo" else _nccl_init_info(body)
            await self._call(
                "entering the communicator",
                engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info}),
                timeout_s=body.timeout_s,
            )
            self._epoch = body.epoch
            return self.info()

    async def begin(self, body: BeginRequest) -> ReplicaInfo:
        """Hold decoding and start to receive; returns as soon as decoding is held.

        Raises:
            ConflictError: Another run or epoch, or a push is under way.
            PushError: The engine could not be held.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            engine = self._check_run(body)
            if body.epoch != self._epoch:
                raise ConflictError(f"this replica is in epoch {self._epoch}, not {body.epoch}; join first")
            if self._update is not None:
                raise ConflictError(f"policy version {self._update.policy_version} is being received; abort it first")
            held_at = time.monotonic()
            self._is_held = True
            self._notify()
            # keep: requests stay in flight. clear_cache: or they would go on from keys and values of the old weights.
            await self._call("holding decoding", engine.pause_generation(mode="keep", clear_cache=True))
            await self._call("starting the update", engine.collective_rpc("start_weight_update"))
            update_info: dict[str, Any] = {
                "names": body.names,
                "dtype_names": body.dtype_names,
                "shapes": body.shapes,
            }
            if _TRANSPORTS[_backend(engine)] == "gloo":
                update_info["timeout_s"] = body.timeout_s
            receiving = asyncio.create_task(
                self._receive(engine, update_info, timeout_s=body.timeout_s), name="receive weights"
            )
            self._update = _Update(body.epoch, body.policy_version, held_at, receiving)
            return self.info()

    async def commit(self, body: CommitRequest) -> CommitReply:
        """Wait for the last byte, finish the update, read the version back, go on decoding.

        Raises:
            ConflictError: Another run or epoch, or that version is not being received.
            PushError: The update failed; this replica stays held.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            engine = self._check_run(body)
            update = self._update
            if update is None or (update.epoch, update.policy_version) != (body.epoch, body.policy_version):
                raise ConflictError(f"policy version {body.policy_version} of epoch {body.epoch} is not being received")
            failure = await update.receiving
            if failure is not None:
                await self._leave(failure)
                raise PushError(failure)
            finish = engine.finish_weight_update(str(body.policy_version))
            await self._call("finishing the update", finish, is_fatal=True)
            read_back = await self._call("reading the version back", engine.get_weight_version(), is_fatal=True)
            if read_back != str(body.policy_version):
                raise self._die(f"policy version {body.policy_version} was loaded, the engine says {read_back}")
            await self._call("going on", engine.resume_generation(), is_fatal=True)
            self._update = None
            self._policy_version = body.policy_version
            self._is_held = False
            self._notify()
            return CommitReply(
                replica_id=self._replica_id,
                policy_version=self._policy_version,
                receive_s=(update.received_at or update.held_at) - update.held_at,
                standstill_s=time.monotonic() - update.held_at,
            )

    async def abort(self, body: AbortRequest) -> ReplicaInfo:
        """Give an update up and leave the communicator. Decoding that is held stays held.

        Raises:
            ConflictError: Another run, or an older epoch.
            PushError: The engine did not leave the communicator.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            self._check_run(body)
            if body.epoch < self._newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
            self._newest_epoch = body.epoch
            await self._leave(body.reason)
            return self.info()

    async def _receive(self, engine: ReceivingEngine, update_info: dict[str, Any], *, timeout_s: float) -> str | None:
        """Return None once everything is loaded, or why it is not."""
        try:
            await self._call(
                "receiving weights",
                engine.collective_rpc("update_weights", kwargs={"update_info": update_info}),
                timeout_s=timeout_s,
            )
        except HeadraceError as error:
            log.warning("%s; decoding stays held until a later push is complete", error)
            if not self.fatal.is_set():
                # The trainer would otherwise wait for us to take the next chunk, and hold everybody until its deadline.
                self._epoch = 0
                await self._shut_down(engine)
            return str(error)
        if self._update is not None:
            self._update.received_at = time.monotonic()
        return None

    async def _leave(self, reason: str) -> None:
        """Leave the communicator, with the engine outside any update."""
        engine, update = self._engine, self._update
        assert engine is not None
        if update is not None:
            log.warning("giving up policy version %d: %s", update.policy_version, reason)
            # The trainer has closed its end, so this ends soon; at the latest by its own deadline.
            failure = await update.receiving
            self._update = None
            self._policy_version = -1
            if failure is None:
                # All bytes came and nobody confirmed them. The engine can only be taken out of an update by finishing
                # it; its version label stays the old one, and decoding stays held.
                await self._call("closing the update", engine.finish_weight_update(), is_fatal=True)
        if self._epoch:
            self._epoch = 0
            await self._shut_down(engine)

    async def _shut_down(self, engine: ReceivingEngine) -> None:
        shutdown = engine.collective_rpc("shutdown_weight_transfer_engine")
        await self._call("leaving the communicator", shutdown, is_fatal=True)

    async def _call(
        self,
        what: str,
        call: Coroutine[Any, Any, _ResultT],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        is_fatal: bool = False,
    ) -> _ResultT:
        """Await a call into the engine.

        Args:
            what: For the message.
            call: The call.
            timeout_s: The engine's own deadline; it gets ``grace_s`` more.
            is_fatal: If it fails, the engine is neither in an update nor out of it, and only a new process helps.

        Raises:
            PushError: It failed.
            UnavailableError: It did not return, or it was fatal. ``fatal`` is set.
        """
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                return await call
        except TimeoutError as error:
            raise self._die(f"{what} did not end within {timeout_s + self._grace_s:.0f} s") from error
        except Exception as error:  # noqa: BLE001  vLLM raises a bare Exception for whatever failed in a worker
            reason = f"{what} failed: {error}"
            if is_fatal:
                raise self._die(reason) from error
            raise PushError(reason) from error

    def _die(self, reason: str) -> UnavailableError:
        log.error("the engine cannot go on: %s", reason)
        self.fatal_reason = self.fatal_reason or f"the engine cannot receive weights any more: {reason}"
        self.fatal.set()
        return UnavailableError(reason)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_run(self, body: "JoinRequest | BeginRequest | CommitRequest | AbortRequest") -> ReceivingEngine:
        if self._engine is None:
            raise UnavailableError("this replica has no model loaded yet; ask again when GET says that it has")
        if self.fatal.is_set():
            raise UnavailableError(self.fatal_reason)
        if body.run_id != self._run_id:
            raise ConflictError(f"this replica serves run {self._run_id}, not {body.run_id}")
        return self._engine

    def _check_versions(self, body: JoinRequest) -> None:
        mine = self.info()
        if body.transport not in mine.transports:
            raise ConflictError(f"this replica receives over {', '.join(mine.transports)}, not over {body.transport}")
        if _release(body.torch_version) != _release(mine.torch_version):
            raise ConflictError(f"this replica runs torch {mine.torch_version}, the trainer {body.torch_version}")
        if body.transport == "nccl" and body.nccl_version != mine.nccl_version:
            raise ConflictError(f"this replica runs NCCL {mine.nccl_version}, the trainer {body.nccl_version}")


def _gloo_init_info(body: JoinRequest) -> dict[str, Any]:
    return {
        "master_address": body.master_address,
        "master_port": body.master_port,
        "rank_offset": body.rank_offset,
        "world_size": body.world_size,
        "buffer_bytes": body.buffer_bytes,
        "timeout_s": body.timeout_s,
    }


def _nccl_init_info(body: JoinRequest) -> dict[str, Any]:
    return {
        "nccl_unique_id_b64": body.nccl_unique_id,
        "rank_offset": body.rank_offset,
        "world_size": body.world_size,
        "packed": True,
        "packed_buffer_size_bytes": body.buffer_bytes,
    }


def _backend(engine: ReceivingEngine) -> str:
    config = engine.vllm_config.weight_transfer_config
    return "" if config is None else str(config.backend)


def _num_workers(engine: ReceivingEngine) -> int:
    parallel = engine.vllm_config.parallel_config
    return int(parallel.world_size) * int(parallel.data_parallel_size)


def _nccl_version() -> str | None:
    if torch.version.cuda is None:
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _release(version: str) -> str:
    return version.partition("+")[0]
