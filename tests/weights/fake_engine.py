"""An engine without a model: the real gloo wire, and a dictionary where the weights would go."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from services.generator.gloo_wire import TrainerGroup
from services.generator.vllm_plugin import GLOO_BACKEND


def is_there(directory: str) -> bool:
    return Path(directory).is_dir()


class FakeEngine:
    """What WeightReceiver needs of AsyncLLM.

    Attributes:
        failing: Calls that raise a bare Exception, as vLLM's do.
        hanging: Calls that do not return until cancelled.
        calls: Every call so far, in order.
    """

    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend=GLOO_BACKEND),
            parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        )
        self._group: TrainerGroup | None = None
        self._buffer_bytes = 0
        self._received: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, Any] | None = None
        self.version = "none"
        self.is_paused = False
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise Exception(f"Call to {name} method failed: out of memory")  # noqa: TRY002  vLLM's way
        if name in self.hanging:
            await asyncio.Event().wait()

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None:
        await self._called("pause_generation")
        assert (mode, clear_cache) == ("keep", True)
        self.is_paused = True

    async def resume_generation(self) -> None:
        await self._called("resume_generation")
        self.is_paused = False

    async def collective_rpc(self, method: str, *, kwargs: Any = None) -> Any:
        await self._called(method)
        if method == "init_weight_transfer_engine":
            await asyncio.to_thread(self._enter, **kwargs["init_info"])
        elif method == "start_weight_update":
            self._received = {}
        elif method == "update_weights":
            self.adapter = kwargs["update_info"].pop("adapter", None)
            await asyncio.to_thread(self._receive, **kwargs["update_info"])
        elif method == "shutdown_weight_transfer_engine":
            self.close()
        else:
            raise AssertionError(f"vLLM has no {method}")

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _enter(self, *, rank_offset: int, buffer_bytes: int, **where: Any) -> None:
        self.close()
        self._buffer_bytes = buffer_bytes
        self._group = TrainerGroup(rank=rank_offset, **where)

    def _receive(self, *, names: list[str], dtype_names: list[str], shapes: list[list[int]], timeout_s: float) -> None:
        assert self._group is not None
        dtypes = [getattr(torch, name) for name in dtype_names]
        specs = zip(names, dtypes, shapes, strict=True)
        for chunk in self._group.receive_chunks(specs, buffer_bytes=self._buffer_bytes, timeout_s=timeout_s):
            self._received.update(chunk)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._called("finish_weight_update")
        self.weights = self._received
        if weight_version is not None:
            self.version = weight_version

    async def update_weight_version(self, new_version: str) -> None:
        await self._called("update_weight_version")
        self.version = new_version

    async def add_lora(self, lora_request: Any) -> bool:
        assert lora_request.load_inplace
        assert self.adapter is not None
        assert lora_request.lora_path == self.adapter["directory"]
        assert is_there(lora_request.lora_path)
        await self._called("add_lora")
        return True

    async def get_weight_version(self) -> str:
        await self._called("get_weight_version")
        return self.version
