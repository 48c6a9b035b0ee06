"""vLLM's NCCL weight-transfer engine, with the checks of checked_reload.py around the loading.

The wire is vLLM's: ``packed_nccl_broadcast_consumer``. NCCL has no deadline here: when the trainer is gone and the wait
does not end, weight_receiver.py ends the process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from services.generator.adapter_reload import AdapterReload
from services.generator.checked_reload import CheckedReload, start_reload


@dataclass
class NcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    """What is about to arrive, in order. ``adapter`` are the arguments of ``AdapterReload.announce``."""

    adapter: dict[str, Any] | None = None


class NcclWeightTransferEngine(NCCLWeightTransferEngine):
    """Receives whole models, or adapters, from the trainer and loads them in place."""

    update_info_cls = NcclUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reload: CheckedReload | AdapterReload | None = None

    def start_weight_update(self) -> None:
        """Prepare the model for a complete set of weights."""
        self._reload = start_reload(self.vllm_config, self.model)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load chunk by chunk, then check that nothing is missing."""
        if self.model_update_group is None or self._reload is None:
            raise RuntimeError("weights were announced before this worker entered a communicator")
        if isinstance(self._reload, AdapterReload):
            assert isinstance(update_info, NcclUpdateInfo)
            self._reload.announce(**(update_info.adapter or {}))

        def expected() -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                yield name, (shape, getattr(torch, dtype_name))

        packed_nccl_broadcast_consumer(
            iterator=expected(),
            group=self.model_update_group,
            src=0,
            post_unpack_func=self._reload.load,
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )
        self._reload.check_complete()

    def finish_weight_update(self) -> None:
        """Put the received weights to use."""
        if self._reload is None:
            raise RuntimeError("a weight update was finished that never started")
        self._reload.finish()
        self._reload = None
