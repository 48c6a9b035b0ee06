"""A vLLM worker's part in a push: receive in a separate thread, load between two steps of the engine.

    main loop:  enter -----> receive ----------> load (nothing is decoded) ----> decode with the new weights
                  |             |                  ^
    thread:     wire open     check the names,     |
                              fill the staging  ---+   checksum
                              memory

Meanwhile the main loop answers ``progress`` and continues to decode. A blocking rendezvous, or a trainer that stops
sending, does not stop the engine. Without staging, the thread loads arriving weights into the model at once, and the
caller must pause decoding first.

The moves come from guarded_engine.py in the generator's process: vLLM's ``collective_rpc`` calls WorkerExtension.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.model_loader.reload import layerwise

from services.generator.worker.disk_wire import DiskWire
from services.generator.worker.ipc_wire import IpcWire, device_uuid
from services.generator.worker.model_check import FullSet, check_adapters, checkpoint_specs
from services.generator.worker.model_load import CheckedReload, write_adapters
from services.generator.worker.staged_weights import StagedWeights, StagingMemory, digest, staging_bytes
from services.generator.worker.weight_wires import Wire, open_wire, receive_chunks, receive_version
from services.generator.worker.worker_reports import CHECKING, ENTERING, FAILURE, IDLE, RECEIVING, Progress, ReportTo
from shared.weights import weight_checksum
from shared.weights.parameter_spec import Spec

log = logging.getLogger(__name__)
cuda: Any = torch.cuda  # partly untyped
_MOVES = frozenset({"enter", "receive", "progress", "leave", "forget", "load", "reserve"})


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return whether vLLM's log line about a layer without new weights is useful. Rotary embeddings never get any."""
    layers = record.args if isinstance(record.args, tuple) else ()
    return not any(str(layer).endswith("RotaryEmbedding") for layer in layers)


logging.getLogger(layerwise.__name__).addFilter(_is_worth_a_line)


class WorkerExtension:
    """Adds the methods of a weight push to vLLM's worker, as the engine argument ``worker_extension_cls``.

    vLLM adds this class to the bases of its own worker, without calling any constructor.
    """

    _headrace_transfer: "WorkerTransfer | None" = None

    def headrace_push(self, move: str, arguments: dict[str, Any], report_to: Sequence[Any] | None = None) -> Any:
        """Call the method ``move`` of this worker's WorkerTransfer, and return its result, or a failure by this name.

        If ``report_to`` is given, the progress of the move is reported to that address.
        """
        try:
            if move not in _MOVES:
                raise ValueError(f"a push has no move {move}")  # noqa: TRY301
            if self._headrace_transfer is None:
                self._headrace_transfer = WorkerTransfer(self)
            if report_to is not None:
                self._headrace_transfer.report_to = ReportTo(*report_to)
            return getattr(self._headrace_transfer, move)(**arguments)
        except Exception as error:
            # Not raised: vLLM's executor stops reading at the first worker that fails, and would take what the other
            # workers answer for their answers to the next call.
            log.exception("the move %s of a push failed", move)
            return {FAILURE: str(error) or type(error).__name__}

    def headrace_make_ready(self) -> None:
        """Allocate the receive buffers of a pipeline worker, which vLLM 0.32 allocates only in a warm-up.

        Without a GPU, vLLM warms up only a few kinds of engines. All workers of a pipeline but the first receive the
        previous worker's activations into these buffers.
        """
        runner: Any = getattr(self, "model_runner")  # noqa: B009  an attribute of vLLM's worker
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class WorkerTransfer:
    """Receives pushed weights in one vLLM worker, and loads the worker's shard of the model from them.

    It lives as long as the worker. Every method except ``reserve`` and ``load`` returns at once: ``enter`` and
    ``receive`` start a job in a thread, and ``progress`` reports on it.

    Attributes:
        report_to: Address to which progress of the next job is reported; None if it is not reported.
    """

    def __init__(self, worker: Any) -> None:
        parallel = worker.parallel_config
        self._model = worker.get_model()
        self._vllm_config = worker.vllm_config
        self._device: torch.device = worker.device
        self._rank: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.report_to: ReportTo | None = None
        self._wire: Wire | None = None
        self._buffer_bytes = 0
        self._shares_gpu = False
        """Whether the trainer computes on this GPU, as far as pushes have shown."""
        self._is_given_up = False
        self._phase = IDLE
        self._failure: str | None = None
        self._full_set = FullSet(self._model, self._vllm_config.model_config)
        self._memory: StagingMemory | None = None
        self._staged: StagedWeights | None = None
        self._checksum: str | None = None
        self._direct: CheckedReload | None = None
        self._stream: Any = None

    def reserve(self) -> None:
        """Allocate staging memory for the model's checkpoint. Page-locking memory for a large model takes minutes.

        Without this, or if the push has other parameters, the next ``receive`` allocates it, within the push's
        deadline.
        """
        if specs := checkpoint_specs(self._vllm_config):
            # The checkpoint does not say which few weights are pushed in float32 (policy_model.exact_weights).
            self._reserve(specs, spare_bytes=staging_bytes(specs) // 500)

    def enter(self, where: dict[str, Any]) -> None:
        """Begin to enter the communicator that ``where`` describes, and leave the current one, if any.

        ``where`` holds the fields of JoinRequest.
        """

        def job() -> None:
            wire = open_wire(where, rank=self._rank, device=self._device, is_given_up=lambda: self._is_given_up)
            self._wire = wire
            self._shares_gpu = isinstance(wire, IpcWire) or self._is_on(where.get("trainer_device_uuid"))
            if self._is_given_up:
                self._close_wire()
                raise RuntimeError("the push was given up while the communicator was formed")

        self._close_wire()
        self._buffer_bytes = int(where["buffer_bytes"])
        self._start(ENTERING, job)

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to receive the parameters that ``what`` announces.

        ``what`` holds the fields of BeginRequest, whether to use ``staging``, and ``adapter``: the directory and the
        PEFT config of adapters, or None if whole models arrive.
        """
        named = zip(what["names"], what["dtype_names"], what["shapes"], strict=True)
        specs = tuple(Spec(name, getattr(torch, dtype_name), tuple(shape)) for name, dtype_name, shape in named)

        def job() -> None:
            with set_current_vllm_config(self._vllm_config):
                if what["adapter"] is not None:
                    self._receive_adapters(specs, what)
                    return
                self._full_set.check(specs)
                if what["staging"]:
                    self._receive_aside(specs, what)
                else:
                    self._enter_phase(RECEIVING)
                    self._receive_directly(specs, timeout_s=what["timeout_s"])

        self._checksum = None
        self._start(CHECKING, job)

    def progress(self) -> Progress:
        """Return the phase of this worker, the failure of its last job, and the checksum of the received weights."""
        return Progress(self._phase, self._failure, self._checksum)

    def leave(self) -> None:
        """Leave the communicator. A job in progress then fails."""
        self._is_given_up = True
        self._close_wire()

    def forget(self) -> None:
        """Discard the received weights, because they must not be used. Their memory is kept for the next push."""
        self._checksum = self._direct = None
        if self._staged is not None:
            self._staged.complete = None

    def load(self) -> None:
        """Load all received weights into the model. Decoding must be paused.

        Raises:
            RuntimeError: The received weights are not complete.
            ValueError: The weights are not the whole model.
        """
        if self._phase != IDLE:
            raise RuntimeError("weights are still being received")
        with set_current_vllm_config(self._vllm_config):
            if self._direct is not None:
                reload, self._direct = self._direct, None
            elif self._staged is not None and self._checksum is not None:
                reload = CheckedReload(self._model, self._vllm_config.model_config)
                tensors = self._staged.tensors.items()
                reload.load((name, tensor.to(self._device, non_blocking=True)) for name, tensor in tensors)
                reload.check_complete()
            else:
                raise RuntimeError("there are no complete weights to load")
            reload.finish()
        if self._device.type == "cuda":
            cuda.synchronize(self._device)

    def _is_on(self, gpu_uuid: str | None) -> bool:
        return gpu_uuid is not None and self._device.type == "cuda" and gpu_uuid == device_uuid(self._device)

    def _reserve(self, specs: Sequence[Spec], *, spare_bytes: int = 0) -> torch.Tensor:
        num_bytes = staging_bytes(specs)
        leaves_gpu = self._shares_gpu and self._memory is not None and self._memory.block.device.type == "cuda"
        if self._memory is None or leaves_gpu or not self._memory.suits(num_bytes):
            self._staged = self._memory = None  # free the old block before allocating another
            if leaves_gpu:
                cuda.empty_cache()
            largest = max(map(staging_bytes, ([spec] for spec in specs)))
            self._memory = StagingMemory(
                num_bytes + spare_bytes, largest=largest, device=self._device, shares_gpu=self._shares_gpu
            )
        return self._memory.block

    def _receive_aside(self, specs: tuple[Spec, ...], what: dict[str, Any]) -> None:
        block = self._reserve(specs)
        if self._staged is None or self._staged.specs != specs:
            self._staged = StagedWeights(specs, block=block)
        self._enter_phase(RECEIVING)
        receive_version(self._staged, self._entered(), what, buffer_bytes=self._buffer_bytes)
        self._checksum = self._staged.complete

    def _receive_directly(self, specs: tuple[Spec, ...], *, timeout_s: float) -> None:
        wire = self._entered()
        if isinstance(wire, DiskWire):
            raise RuntimeError("weights on disk are read into staging memory, but this run has none")  # noqa: TRY004
        self._staged = self._memory = None
        reload = CheckedReload(self._model, self._vllm_config.model_config)
        # vLLM keeps these tensors until a layer is complete, and a chunk may end within a layer. So each is copied.
        digests: list[tuple[str, bytes]] = []
        for chunk in receive_chunks(wire, specs, buffer_bytes=self._buffer_bytes, timeout_s=timeout_s):
            for name, tensor in chunk:
                digests.append((name, digest(tensor)))
                reload.load([(name, tensor.to(self._device, copy=True))])
        reload.check_complete()
        self._direct, self._checksum = reload, weight_checksum.checksum(digests)

    def _receive_adapters(self, specs: tuple[Spec, ...], what: dict[str, Any]) -> None:
        config: dict[str, Any] = what["adapter"]["config"]
        check_adapters(self._model, specs, rank=config["r"])
        self._enter_phase(RECEIVING)
        staged = StagedWeights(specs)
        receive_version(staged, self._entered(), what, buffer_bytes=self._buffer_bytes)
        write_adapters(staged.tensors, directory=Path(what["adapter"]["directory"]), config=config)
        self._checksum = staged.complete

    def _entered(self) -> Wire:
        if self._wire is None:
            raise RuntimeError("weights were announced before this worker entered a communicator")
        return self._wire

    def _start(self, phase: str, job: Callable[[], None]) -> None:
        if self._phase != IDLE:
            raise RuntimeError(f"this worker is still {self._phase}")
        self._failure, self._is_given_up, self._direct = None, False, None
        self._enter_phase(phase)

        def run() -> None:
            try:
                with torch.no_grad(), self._own_stream():
                    job()
            except Exception as error:  # noqa: BLE001  reported as progress, whatever it is
                self._failure = str(error) or type(error).__name__
            finally:
                self._enter_phase(IDLE)

        threading.Thread(target=run, name="weight push", daemon=True).start()

    def _enter_phase(self, phase: str) -> None:
        self._phase = phase
        if self.report_to is not None:
            self.report_to.send(self._rank, self.progress())

    def _close_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.leave()

    @contextlib.contextmanager
    def _own_stream(self) -> Generator[None]:
        """On a GPU, run the block on a stream beside the engine's, and wait for the stream at the end."""
        if self._device.type != "cuda":
            yield
            return
        cuda.set_device(self._device)
        if self._stream is None:
            # One stream for all jobs, because memory that was freed on a stream is kept for that stream.
            self._stream = cuda.Stream(self._device)
        with cuda.stream(self._stream):
            yield
        self._stream.synchronize()
