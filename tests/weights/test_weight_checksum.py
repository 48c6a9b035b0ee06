"""Which changes the checksum of weights detects, and that both ends of the wire compute the same one."""

import threading

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from services.generator.worker import staged_weights
from services.generator.worker.staged_weights import StagedWeights, digest_threads
from services.generator.worker.staged_weights import digest as digest_of_receiver
from services.trainer.push.packing import SentDigests
from services.trainer.push.packing import digest as digest_of_sender
from shared.weights.parameter_spec import Spec
from shared.weights.weight_checksum import WORDS_A_ROW, checksum, digest, digest_on_device

pytestmark = pytest.mark.unit

ROW_BYTES = 8 * WORDS_A_ROW


def some_bytes(size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 7, ROW_BYTES, ROW_BYTES + 3, 70 * ROW_BYTES + 1])
def test_every_flipped_bit_shows(size: int) -> None:
    data = some_bytes(size)
    whole = digest(data)
    for place in {0, size // 2, size - 1, min(size - 1, ROW_BYTES - 1)}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert digest(data) != whole
            data[place] ^= 1 << bit
    assert digest(data) == whole


@pytest.mark.parametrize(("a", "b", "size"), [(0, 1, 8), (0, 7, ROW_BYTES), (3, 66, ROW_BYTES)])
def test_blocks_that_trade_places_show(a: int, b: int, size: int) -> None:
    data = some_bytes(80 * ROW_BYTES)
    other = data.copy()
    other[a * size : (a + 1) * size] = data[b * size : (b + 1) * size]
    other[b * size : (b + 1) * size] = data[a * size : (a + 1) * size]
    assert digest(other) != digest(data)


def test_zeros_at_the_end_and_parameters_that_trade_names_show() -> None:
    assert digest(np.zeros(ROW_BYTES, np.uint8)) != digest(np.zeros(2 * ROW_BYTES, np.uint8))
    one, two = digest(some_bytes(5)), digest(some_bytes(6))
    assert checksum([("a", one), ("b", two)]) != checksum([("a", two), ("b", one)])
    assert checksum([("a", one), ("b", two)]) == checksum([("b", two), ("a", one)])


@pytest.mark.parametrize("offset", [0, 1, 2, 6, 8])
@pytest.mark.parametrize("size", [5, ROW_BYTES, 3 * ROW_BYTES + 6])
def test_a_parameter_may_begin_anywhere_in_a_chunk_of_a_push(offset: int, size: int) -> None:
    chunk = some_bytes(offset + size)
    assert digest_on_device(torch.from_numpy(chunk)[offset:], int64=torch.int64) == digest(chunk[offset:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sender_and_receiver_say_the_same_of_the_same_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = {
        "matrix": (torch.randn(300, 70) * 100).to(dtype).t(),
        "vector": (torch.randn(33) * 100).to(dtype),
        "number": torch.tensor(3.0).to(dtype),
        "nothing": torch.zeros(0, dtype=dtype),
    }
    sent = SentDigests()
    staged = StagedWeights([Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()])
    for name, tensor in sent.watching(weights.items()):
        staged.put(name, tensor)
        assert digest_of_sender(tensor) == digest_of_receiver(staged.tensors[name])
    assert staged.checksum() == sent.checksum()
    staged.tensors["matrix"][2, 5] += 1
    staged.changed("matrix")
    assert staged.checksum() != sent.checksum()


def test_digests_of_several_parameters_are_computed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both_run = threading.Barrier(2)

    def digest_beside_another(place: torch.Tensor) -> bytes:
        both_run.wait(timeout=60)
        return digest_of_receiver(place)

    specs = [Spec("a", torch.float32, (3,)), Spec("b", torch.float32, (4,))]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    one_thread = StagedWeights(specs)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    two_threads = StagedWeights(specs)
    for name, _, shape in specs:
        one_thread.put(name, torch.ones(shape))
    monkeypatch.setattr(staged_weights, "digest", digest_beside_another)
    for name, _, shape in specs:
        two_threads.put(name, torch.ones(shape))
    assert two_threads.checksum() == one_thread.checksum()


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (15, 1), (16, 2), (32, 4), (192, 4)])
def test_a_small_machine_has_one_digest_thread_and_a_large_one_four(num_cores: int, num_threads: int) -> None:
    assert digest_threads(num_cores) == num_threads


def test_only_what_was_announced_is_staged() -> None:
    staged = StagedWeights([Spec("a", torch.float32, (2, 3))])
    assert staged.specs == (Spec("a", torch.float32, (2, 3)),)
    with pytest.raises(ValueError, match="not announced"):
        staged.put("b", torch.zeros(2, 3))
    with pytest.raises(ValueError, match="not announced"):
        staged.put("a", torch.zeros(2, 3, dtype=torch.bfloat16))
