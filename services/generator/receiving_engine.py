"""The engine calls of a weight push, each with a deadline and each error a sentence.

    enter --> hold, start, receive --> finish, read back, resume      or: leave

Adapters are put in place by the end of ``receive``: vLLM's own update, which drops all adapters when it ends, is over
by then. What decides what is served is the hold, and only ``finish`` names a new version.

Some calls leave the engine neither in an update nor out of it when they fail, and a worker that is stuck in any of them
cannot be recalled. Both are fatal: only a new process helps, and whoever owns this one is told.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from services.generator.adapter import AdapterSpec, adapter_directory, loading_request
from services.generator.vllm_plugin import GLOO_BACKEND, NCCL_BACKEND
from shared.control import BeginRequest, JoinRequest, Transport
from shared.errors import PushError, UnavailableError

_TRANSPORTS: dict[str, Transport] = {GLOO_BACKEND: "gloo", NCCL_BACKEND: "nccl"}
_CALL_TIMEOUT_S = 60.0
"""Deadline of calls that move no weights."""
_ResultT = TypeVar("_ResultT")


class ReceivingEngine(Protocol):
    """What a push needs of vLLM's AsyncLLM."""

    vllm_config: Any

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None:
        """Hold decoding."""
        ...

    async def resume_generation(self) -> None:
        """Go on."""
        ...

    async def collective_rpc(self, method: str, *, kwargs: Any = None) -> Any:
        """Call a method of every worker."""
        ...

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update, and name what is held now."""
        ...

    async def update_weight_version(self, new_version: str) -> None:
        """Name what is held now."""
        ...

    async def get_weight_version(self) -> str:
        """Return that name."""
        ...

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        ...


class GuardedEngine:
    """An engine that either answers in time or is given up.

    Args:
        engine: vLLM's.
        adapter: What it serves adapters of; None if whole models arrive.
        grace_s: How long past its own deadline a call may take before the engine counts as stuck.
        on_fatal: Told why, once nothing can be done with the engine any more.

    Every call raises PushError if it failed, and UnavailableError if that was fatal.
    """

    def __init__(
        self,
        engine: ReceivingEngine,
        *,
        adapter: AdapterSpec | None = None,
        grace_s: float,
        on_fatal: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._grace_s = grace_s
        self._on_fatal = on_fatal

    @property
    def transport(self) -> Transport | None:
        """What its workers receive over."""
        config = self._engine.vllm_config.weight_transfer_config
        return None if config is None else _TRANSPORTS.get(config.backend)

    @property
    def num_workers(self) -> int:
        """How many ranks it takes in a communicator."""
        parallel = self._engine.vllm_config.parallel_config
        return int(parallel.world_size) * int(parallel.data_parallel_size)

    async def enter(self, body: JoinRequest) -> None:
        """Have every worker enter the trainer's communicator."""
        place: dict[str, Any] = {"rank_offset": body.rank_offset, "world_size": body.world_size}
        if body.transport == "gloo":
            place["master_address"] = body.master_address
            place["master_port"] = body.master_port
            place["buffer_bytes"] = body.buffer_bytes
            place["timeout_s"] = body.timeout_s
        else:
            place["nccl_unique_id_b64"] = body.nccl_unique_id
            place["packed"] = True
            place["packed_buffer_size_bytes"] = body.buffer_bytes
        call = self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": place})
        await self._call("entering the communicator", call, timeout_s=body.timeout_s)

    async def hold(self) -> None:
        """Hold decoding; requests stay in flight."""
        # clear_cache: or they would go on from keys and values of the old weights.
        await self._call("holding decoding", self._engine.pause_generation(mode="keep", clear_cache=True))

    async def start(self) -> None:
        """Prepare every worker for a complete set of weights."""
        await self._call("starting the update", self._engine.collective_rpc("start_weight_update"))

    async def receive(self, body: BeginRequest) -> None:
        """Receive and load everything."""
        info: dict[str, Any] = {"names": body.names, "dtype_names": body.dtype_names, "shapes": body.shapes}
        if self.transport == "gloo":
            info["timeout_s"] = body.timeout_s
        if self._adapter is None:
            await self._receive(info, timeout_s=body.timeout_s)
            return
        with adapter_directory() as directory:
            info["adapter"] = {"directory": str(directory), "config": self._adapter.peft_config()}
            await self._receive(info, timeout_s=body.timeout_s)
            await self._call("ending vLLM's update", self._engine.finish_weight_update(None), is_fatal=True)
            await self._call("loading the adapter", self._engine.add_lora(loading_request(directory)))

    async def finish(self, policy_version: int | None) -> None:
        """End the update and, if there is one, take on the version."""
        label = None if policy_version is None else str(policy_version)
        if self._adapter is None:
            await self._call("finishing the update", self._engine.finish_weight_update(label), is_fatal=True)
        elif label is not None:
            await self._call("naming the version", self._engine.update_weight_version(label), is_fatal=True)
        if label is None:
            return
        read_back = await self._call("reading the version back", self._engine.get_weight_version(), is_fatal=True)
        if read_back != label:
            raise self._die(f"policy version {label} was loaded, the engine says {read_back}")

    async def resume(self) -> None:
        """Go on decoding."""
        await self._call("going on", self._engine.resume_generation(), is_fatal=True)

    async def leave(self) -> None:
        """Have every worker leave the communicator; not in an update."""
        call = self._engine.collective_rpc("shutdown_weight_transfer_engine")
        await self._call("leaving the communicator", call, is_fatal=True)

    async def _receive(self, info: dict[str, Any], *, timeout_s: float) -> None:
        call = self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
        await self._call("receiving weights", call, timeout_s=timeout_s)

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
            reason = f"{what} failed: {error}"
            if is_fatal:
                raise self._die(reason) from error
            raise PushError(reason) from error

    def _die(self, reason: str) -> UnavailableError:
        self._on_fatal(reason)
        return UnavailableError(reason)
