"""Memory for the copy that a checkpoint is written from: one block of the state's size, page-locked for a GPU."""

import gc
import math

import pytest

torch = pytest.importorskip("torch")

from services.trainer.checkpoints.copy_memory import CopyMemory  # noqa: E402

pytestmark = pytest.mark.unit

SIZES = [(1000, 97), (97,), (), (7, 33), (0, 3), (96, 511)]
STATE = [torch.randn(size).to(dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)]


class Cuda:
    """CUDA's functions that lock memory, which may refuse to."""

    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self._code = code

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        if not self._code:
            assert address not in self.locked
            self.locked[address] = num_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def on(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    def cudart() -> Cuda:
        return cuda

    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    return cuda


def test_copies_are_the_tensors_bit_by_bit_and_stay_as_they_are() -> None:
    state = [tensor.clone() for tensor in STATE]
    copies = CopyMemory().copy(state, locks=False)
    for tensor in state:
        tensor.zero_()
    for copy, tensor in zip(copies, STATE, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert copy.is_contiguous()
        assert torch.equal(copy.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_block_of_the_states_size_is_locked_once_and_unlocked_with_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, memory = on(Cuda(), monkeypatch), CopyMemory()
    first = memory.copy(STATE, locks=True)
    assert memory.copy(STATE, locks=True)[0].data_ptr() == first[0].data_ptr()
    num_bytes = sum(tensor.nbytes for tensor in STATE)
    rounded = sum(2 ** math.ceil(math.log2(tensor.nbytes)) for tensor in STATE if tensor.nbytes)
    assert cuda.locked == {first[0].data_ptr(): pytest.approx(num_bytes, abs=64 * len(STATE))}
    assert sum(cuda.locked.values()) < 0.9 * rounded, "torch's allocator would lock more"
    larger = memory.copy([*STATE, *STATE], locks=True)
    assert list(cuda.locked) == [larger[0].data_ptr()]
    del memory
    gc.collect()
    assert cuda.locked == {}


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(Cuda(code=2), monkeypatch)
    (copy,) = CopyMemory().copy([torch.arange(5)], locks=True)
    assert copy.tolist() == [0, 1, 2, 3, 4]
    assert "cannot be page-locked (CUDA error 2)" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpus_tensors_are_copied_to_locked_memory() -> None:
    state = [tensor.cuda() for tensor in STATE]
    copies = CopyMemory().copy(state, locks=True)
    assert copies[0].is_pinned()
    for copy, tensor in zip(copies, STATE, strict=True):
        assert torch.equal(copy, tensor)
