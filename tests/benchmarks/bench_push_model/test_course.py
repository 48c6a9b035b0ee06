"""The model of a push: its course by hand, and the bytes that stand-ins charge for."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.bench_push_model.course import Chunk, course_s
from benchmarks.bench_push_model.here import modelled_s
from benchmarks.bench_push_model.large import Bandwidths, large_push
from benchmarks.bench_push_model.stand_ins import Sent, staged_bytes_of_chunks

EQUAL = Chunk(1, ready_s=2.0, send_s=3.0, stage_s=1.0, digest_s=0.5)


def halved() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield float32 weights on the meta device, converted to bfloat16: 40, 12 and 8 MB."""
    for name, size in {"embed": 20_000_000, "layer": 6_000_000, "head": 4_000_000}.items():
        yield name, torch.empty(size, device="meta").to(torch.bfloat16)


@pytest.mark.parametrize(
    ("num_buffers", "seconds"),
    [
        (1, 3 * (2.0 + 3.0) + 1.0 + 0.5),  # each chunk is made ready after the one before was sent
        (2, 2.0 + 3 * 3.0 + 2 * 1.0 + 1.0 + 0.5),  # sends wait only for the generator, which stages in between
    ],
)
def test_the_course_of_three_equal_chunks_is_as_worked_out_by_hand(num_buffers: int, seconds: float) -> None:
    assert course_s([EQUAL] * 3, num_buffers=num_buffers) == pytest.approx(seconds)


def test_a_slow_digest_ends_after_the_last_chunk_was_staged() -> None:
    chunks = [Chunk(1, ready_s=0.0, send_s=1.0, stage_s=0.0, digest_s=4.0)] * 3
    assert course_s(chunks, num_buffers=1) == 1.0 + 3 * 4.0


def test_chunks_end_with_the_parameter_that_takes_them_past_their_size_and_every_copy_is_charged() -> None:
    sent = Sent(halved, buffer_bytes=16_000_000)
    assert sent.chunk_bytes == [40_000_000, 20_000_000]
    # Converted (4 bytes read, 2 written a weight) and packed (2 read, 2 written).
    assert sent.moved_bytes == [20_000_000 * 10, 10_000_000 * 10]
    assert staged_bytes_of_chunks(sent.specs, buffer_bytes=16_000_000) == [80_000_000, 40_000_000]


def test_the_small_push_takes_its_longest_chain_and_at_least_its_work_on_all_cores() -> None:
    sent = Sent(halved, buffer_bytes=1 << 40)
    phases = {"convert": 2.0, "pack": 1.0, "sent_digest": 0.0, "send": 3.0, "stage": 1.0, "digest": 0.5, "load": 0.25}
    assert modelled_s(sent, phases) == pytest.approx(3.0 + 3.0 + 1.0 + 0.5 + 0.25), "a single chunk"
    slow_digest = {**phases, "sent_digest": 1000.0}
    assert modelled_s(sent, slow_digest) >= 1000.25


def test_a_large_push_in_seconds_and_bytes_is_as_worked_out_by_hand() -> None:
    """60 MB take 20 ms at 3 GB/s, and 120 ms where 2 workers share 1 GB/s. Locked for 8, 12, 40 MB: 8, 16, 64 MiB."""
    given = Bandwidths(3.0, 1e9, 1e9, pcie=50.0, main_memory=1.0, digest=1e9, page_lock=2.0, disk=0.06)
    push = large_push(Sent(halved, buffer_bytes=1 << 40), given, trainer_gpus=1, tensor_parallel=2)
    assert push.num_bytes == 60_000_000
    assert push.gather_s == 0.0
    assert push.send_s == pytest.approx(0.02)
    assert push.stage_s == pytest.approx(0.12)
    assert push.load_s == pytest.approx(0.12)
    assert push.push_s == pytest.approx(0.02 + 0.12 + 0.12 + 0.12, rel=1e-3), "sent, staged, digested, loaded"
    assert push.allowed_s == pytest.approx(60.0 + 0.12)
    assert push.locked_bytes_a_worker == pytest.approx(60_000_000, rel=1e-5)
    assert push.locked_bytes_a_worker_before == (8 + 16 + 64) * 2**20
    assert push.locked_bytes_a_replica == 2 * push.locked_bytes_a_worker
    assert push.push_before_s == push.push_s, "main memory is slower than one digest thread"
    assert push.disk_push_s == pytest.approx(0.12 + 1.0 + 2.0 + 0.12 + 0.12, rel=1e-3)
