"""vLLM weight-transfer engine over gloo: what a worker does in a push on CPU. The wire is gloo_wire.py's."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from services.generator.adapter_reload import AdapterReload
from services.generator.checked_reload import CheckedReload, start_reload
from services.generator.gloo_wire import TrainerGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is, and who we are in the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    buffer_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to arrive, in order. ``adapter`` are the arguments of ``AdapterReload.announce``."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    timeout_s: float
    adapter: dict[str, Any] | None = None


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives whole models, or adapters, from the trainer and loads them in place."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: TrainerGroup | None = None
        self._buffer_bytes = 0
        self._reload: CheckedReload | AdapterReload | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Enter the trainer's communicator; blocks until every rank is there or ``timeout_s`` has passed."""
        self.shutdown()
        parallel = self.parallel_config
        self._group = TrainerGroup(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )
        self._buffer_bytes = init_info.buffer_bytes

    def start_weight_update(self) -> None:
        """Prepare the model for a complete set of weights."""
        self._reload = start_reload(self.vllm_config, self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive everything. vLLM's own version would wait for an accelerator, which may not be there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load chunk by chunk, then check that nothing is missing."""
        if self._group is None or self._reload is None:
            raise RuntimeError("weights were announced before this worker entered a communicator")
        if isinstance(self._reload, AdapterReload):
            self._reload.announce(**(update_info.adapter or {}))
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        chunks = self._group.receive_chunks(
            zip(update_info.names, dtypes, update_info.shapes, strict=True),
            buffer_bytes=self._buffer_bytes,
            timeout_s=update_info.timeout_s,
        )
        for chunk in chunks:
            self._reload.load((name, tensor.to(self.device)) for name, tensor in chunk)
        self._reload.check_complete()

    def finish_weight_update(self) -> None:
        """Put the received weights to use."""
        if self._reload is None:
            raise RuntimeError("a weight update was finished that never started")
        self._reload.finish()
        self._reload = None

    def shutdown(self) -> None:
        """Leave the communicator; whoever waits for us in it gets an error at once."""
        if self._group is not None:
            self._group.leave()
        self._group = None
