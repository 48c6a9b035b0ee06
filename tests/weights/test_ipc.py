"""The wire within one GPU, without a GPU: buffers are in the host's memory, and the driver's handles are fake.

The gloo group that signals when bytes are ready is real. The parts that need a GPU are tested in
tests/weights/test_ipc_gpu.py.
"""

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("torch")

import torch

from services.generator.worker import ipc_wire
from services.generator.worker.gloo_wire import GlooWire
from services.generator.worker.ipc_wire import IpcWire, map_buffer
from services.generator.worker.weight_wires import receive_chunks
from services.trainer.push import gloo_communicator
from services.trainer.push.gloo_communicator import IpcCommunicator
from services.trainer.push.packing import announce, pack
from shared.control import IpcBuffer
from shared.errors import PushError
from shared.weights.parameter_spec import Spec

pytestmark = pytest.mark.unit

UUID = "8a1c5f2e-0000-4000-8000-0123456789ab"
BUFFER_BYTES = 1_000
DEVICE = torch.device("cuda", 0)
HANDLE, COUNTER, EVENT = b"h" * 66, b"/torch_41_99_0", b"e" * 64


class Stream:
    def __init__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def properties_of(uuid: str) -> Callable[[torch.device], SimpleNamespace]:
    def properties(_: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuid)

    return properties


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Replace the driver: every export and every mapping gets this one buffer."""
    memory = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def share(storage: Any) -> tuple[Any, ...]:
        assert storage.data_ptr() == memory.untyped_storage().data_ptr()
        return 0, HANDLE, BUFFER_BYTES, 512, COUNTER, 3, EVENT, True

    def map_shared(*fields: Any) -> Any:
        assert fields == (0, HANDLE, BUFFER_BYTES, 512, COUNTER, 3, EVENT, True)
        return memory.untyped_storage()

    def own_buffer(_device: torch.device, num_bytes: int) -> torch.Tensor:
        assert num_bytes == BUFFER_BYTES
        return memory

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(map_shared))
    monkeypatch.setattr(gloo_communicator, "_buffer", own_buffer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of(UUID))
    return memory


@pytest.fixture
def communicator(gpu: torch.Tensor) -> Iterator[IpcCommunicator]:
    assert gpu.numel() == BUFFER_BYTES
    communicator = IpcCommunicator(address="127.0.0.1", buffer_bytes=BUFFER_BYTES)
    yield communicator
    communicator.close()


def enter(communicator: IpcCommunicator) -> IpcWire:
    """Enter as a worker that was sent the join body."""
    place = IpcBuffer.model_validate_json(communicator.export().model_dump_json())
    group = GlooWire(master_address="127.0.0.1", master_port=communicator.port, rank=1, world_size=2, timeout_s=20)
    return IpcWire(group, map_buffer(place, DEVICE))


def test_bytes_come_out_of_the_buffer_unchanged_in_pieces_of_any_size(communicator: IpcCommunicator) -> None:
    torch.manual_seed(3)
    # One is larger than the buffer, one ends in the middle of it, and one has an unaligned number of bytes.
    weights = [("wide", torch.randn(40, 30)), ("codes", torch.arange(7, dtype=torch.int8)), ("last", torch.randn(11))]
    announced = announce(weights)

    def receive() -> dict[str, torch.Tensor]:
        group = enter(communicator)
        chunks = receive_chunks(group, announced, buffer_bytes=400, timeout_s=20)
        received = {name: tensor for chunk in chunks for name, tensor in chunk}
        group.leave()
        return received

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive)
        communicator.rendezvous(world_size=2, timeout_s=20)
        for chunk in pack(weights, announced, buffer_bytes=400):
            communicator.broadcast(chunk, timeout_s=20)
        received = receiving.result(timeout=120)
    assert all(torch.equal(received[name], tensor) for name, tensor in weights)


def test_a_worker_that_leaves_in_the_middle_ends_the_trainers_wait(communicator: IpcCommunicator) -> None:
    left = threading.Event()

    def leave() -> None:
        group = enter(communicator)
        left.wait(20)
        group.leave()

    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(leave)
        communicator.rendezvous(world_size=2, timeout_s=20)
        left.set()
        leaving.result(timeout=120)
        with pytest.raises(PushError, match="broke off"):
            communicator.broadcast(torch.zeros(2_000, dtype=torch.uint8), timeout_s=5)


def test_a_size_that_was_not_announced_is_refused(communicator: IpcCommunicator) -> None:
    def receive() -> None:
        group = enter(communicator)
        try:
            for chunk in receive_chunks(group, [Spec("small", torch.uint8, (10,))], buffer_bytes=400, timeout_s=20):
                list(chunk)
        finally:
            group.leave()

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive)
        communicator.rendezvous(world_size=2, timeout_s=20)
        with contextlib.suppress(PushError):
            communicator.broadcast(torch.zeros(20, dtype=torch.uint8), timeout_s=5)
        with pytest.raises(RuntimeError, match="20 bytes in its buffer, which does not match its announcement"):
            receiving.result(timeout=120)


def place(**changes: Any) -> IpcBuffer:
    fields: dict[str, Any] = {
        "device_uuid": UUID,
        "num_bytes": BUFFER_BYTES,
        "handle": base64.b64encode(HANDLE).decode(),
        "storage_bytes": BUFFER_BYTES,
        "storage_offset_bytes": 512,
        "ref_counter_handle": base64.b64encode(COUNTER).decode(),
        "ref_counter_offset": 3,
        "event_handle": base64.b64encode(EVENT).decode(),
        "event_sync_required": True,
    }
    return IpcBuffer.model_validate(fields | changes)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"device_uuid": UUID.replace("8", "9")}, "ipc is for one GPU, set weight_transport: nccl"),
        ({"num_bytes": BUFFER_BYTES + 1}, "1001 bytes cannot be in 1000 bytes"),
        ({"handle": base64.b64encode(b"short").decode()}, "does not belong to a CUDA buffer"),
        ({"event_handle": base64.b64encode(b"short").decode()}, "does not belong to a CUDA buffer"),
        ({"ref_counter_handle": base64.b64encode(b"/../etc/passwd").decode()}, "does not belong to a CUDA buffer"),
    ],
)
def test_fields_that_cannot_be_a_buffer_on_our_gpu_never_reach_the_driver(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_shared(*_: Any) -> Any:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(map_shared))
    with pytest.raises(RuntimeError, match=complaint):
        map_buffer(place(**changes), DEVICE)


@pytest.mark.parametrize(
    "changes", [{"handle": "not base64!"}, {"handle": "A" * 4_000}, {"device_uuid": "../x"}, {"num_bytes": 0}]
)
def test_a_join_body_with_other_fields_is_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        place(**changes)


def test_both_ends_name_a_gpu_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of(f"GPU-{UUID}"))
    assert ipc_wire.device_uuid(DEVICE) == gloo_communicator.device_uuid(DEVICE) == UUID


@pytest.mark.parametrize(
    ("chosen", "meanwhile"),
    [
        (
            "roundup_power2_divisions:[256:1,512:2], expandable_segments:True,",
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:False",
        ),
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64", None),
        ("", None),
    ],
)
def test_the_buffer_is_never_in_an_expandable_segment_which_others_may_not_be_allowed_to_map(
    chosen: str, meanwhile: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_getAllocatorSettings", lambda: chosen)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", set_to.append)
    monkeypatch.setattr(gloo_communicator, "_buffers", {})

    def empty(*_: object, **__: object) -> str:
        assert set_to == ([] if meanwhile is None else [meanwhile])
        return "the buffer"

    monkeypatch.setattr(torch, "empty", empty)
    assert gloo_communicator._buffer(DEVICE, BUFFER_BYTES) == "the buffer"  # pyright: ignore[reportPrivateUsage]
    assert set_to == ([] if meanwhile is None else [meanwhile, chosen])
