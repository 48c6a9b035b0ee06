"""Memory for staged weights: one block of the weights' size, page-locked for an engine on a GPU."""

import gc
import math
from collections.abc import Callable

import pytest
import torch

from services.generator.worker.staged_weights import StagedWeights, StagingMemory, staging_bytes, staging_device
from shared.weights.parameter_spec import Spec

GPU = torch.device("cuda", 0)
LAYER = [
    Spec("embed", torch.bfloat16, (1000, 96)),
    Spec("norm", torch.bfloat16, (96,)),
    Spec("scale", torch.bfloat16, (1,)),
    Spec("router", torch.float32, (7, 33)),
    Spec("table", torch.int64, (5,)),
    Spec("number", torch.float32, ()),
    Spec("nothing", torch.float32, (0, 3)),
    Spec("down", torch.bfloat16, (96, 511)),
]


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return what is page-locked, as address to bytes, on a machine whose GPU has no room."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    from vllm.v1.kv_offload.cpu import host_register

    locked: dict[int, int] = {}

    def lock(address: int, num_bytes: int) -> bool:
        locked[address] = num_bytes
        return True

    no_room: Callable[[torch.device], tuple[int, int]] = lambda _: (0, 80 << 30)  # noqa: E731
    monkeypatch.setattr(host_register, "host_register", lock)
    monkeypatch.setattr(host_register, "host_unregister", locked.pop)
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_room)
    return locked


def test_staged_weights_share_one_block_of_their_size() -> None:
    torch.manual_seed(0)
    weights = {name: torch.empty(shape).normal_(std=100.0).to(dtype) for name, dtype, shape in LAYER}
    block = torch.empty(staging_bytes(LAYER), dtype=torch.uint8)
    staged = StagedWeights(LAYER, block=block)
    for name, tensor in weights.items():
        staged.put(name, tensor)
    assert block.numel() == pytest.approx(sum(tensor.nbytes for tensor in weights.values()), rel=0.05)
    for name, tensor in staged.tensors.items():
        assert tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        assert torch.equal(tensor.view(-1).view(torch.uint8), weights[name].view(-1).view(torch.uint8)), name


def test_main_memory_of_an_engine_on_a_gpu_is_page_locked_exactly_once(locked: dict[int, int]) -> None:
    num_bytes = 3 * (1 << 20) + 1
    assert num_bytes < 0.8 * 2 ** math.ceil(math.log2(num_bytes)), "torch's allocator would lock a quarter more"
    memory = StagingMemory(num_bytes, largest=0, device=GPU)
    assert memory.block.device.type == "cpu"
    assert locked == {memory.block.data_ptr(): num_bytes}
    del memory
    gc.collect()
    assert locked == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_page_locked_memory_is_copied_to_a_gpu_and_unlocked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room: Callable[[torch.device], tuple[int, int]] = lambda _: (0, 80 << 30)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_room)
    for _ in range(2):  # the same address could not be locked again if it was still locked
        memory = StagingMemory((1 << 20) + 3, largest=0, device=GPU)
        assert memory.block.is_pinned()
        memory.block.copy_(torch.arange(memory.block.numel()).to(torch.uint8))
        assert torch.equal(memory.block.to(GPU, non_blocking=True).cpu(), memory.block)
        block = memory.block
        del memory
        gc.collect()
        assert not block.is_pinned()


def test_main_memory_of_an_engine_on_a_cpu_is_not_page_locked(locked: dict[int, int]) -> None:
    assert StagingMemory(1000, largest=0, device=torch.device("cpu")).block.numel() == 1000
    assert locked == {}


@pytest.mark.parametrize(("free_gib", "where"), [(17.0, "cuda"), (15.9, "cpu")])
def test_a_gpu_keeps_room_for_a_chunk_with_the_largest_parameter(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, where: str
) -> None:
    """Of 16 GiB, 13 are weights, 2 are the embeddings in a chunk, and 1 is for the rest."""

    def free(_: torch.device) -> tuple[int, int]:
        return int(free_gib * 2**30), 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    assert staging_device((13 + 2) << 30, GPU).type == where
    assert staging_device((13 + 2) << 30, GPU, shares_gpu=True).type == "cpu"


def test_a_block_suits_weights_that_use_nearly_all_of_it() -> None:
    memory = StagingMemory(1000, largest=0, device=torch.device("cpu"))
    assert memory.suits(1000)
    assert memory.suits(960)
    assert not memory.suits(1001)
    assert not memory.suits(900)
