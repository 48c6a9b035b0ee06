"""Deltas: decoding restores the encoded bytes exactly, and damaged ones are refused."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

pytest.importorskip("torch")

import torch

from services.generator.worker.staged_weights import apply_delta
from shared.weights.weight_delta import Delta, Positions, Values, encode_delta, parse_delta

pytestmark = pytest.mark.unit

DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
ITEM_BYTES = st.sampled_from([1, 2, 4, 8])
Bytes = npt.NDArray[np.uint8]


def tensor_of(data: Bytes, item_bytes: int) -> torch.Tensor:
    tensor = torch.empty(data.size, dtype=torch.uint8)
    tensor.numpy()[:] = data
    return tensor.view(DTYPES[item_bytes])


def applied(before: Bytes, delta: bytes, item_bytes: int) -> bytes:
    """Return the bytes of ``before``, as a tensor with this element size, after the delta."""
    target = tensor_of(before, item_bytes)
    apply_delta(target, delta)
    return target.view(torch.uint8).numpy().tobytes()


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[int, Bytes, Bytes]:
    """Draw an element size and the bytes of two versions: any bits, so any NaN, and any share of changes."""
    item_bytes = draw(ITEM_BYTES)
    num_elements = draw(st.integers(0, 600))
    before = draw(arrays.arrays(np.uint8, num_elements * item_bytes))
    after = before.copy()
    kind = draw(st.sampled_from(["few", "near", "all", "none"]))
    if kind == "all":
        after = draw(arrays.arrays(np.uint8, num_elements * item_bytes))
    elif kind != "none" and num_elements:
        elements = after.reshape(num_elements, item_bytes)
        for position in draw(st.lists(st.integers(0, num_elements - 1), max_size=40)):
            byte = 0 if kind == "near" else draw(st.integers(0, item_bytes - 1))
            elements[position, byte] = draw(st.integers(0, 255))
    return item_bytes, before, after


@given(two_versions())
def test_a_decoded_delta_is_the_newer_version_bit_for_bit(versions: tuple[int, Bytes, Bytes]) -> None:
    item_bytes, before, after = versions
    delta = encode_delta(before, after, item_bytes=item_bytes)
    assert applied(before, delta, item_bytes) == after.tobytes()


@given(two_versions(), st.data())
def test_a_cut_off_or_flipped_delta_is_refused_and_changes_nothing(
    versions: tuple[int, Bytes, Bytes], data: st.DataObject
) -> None:
    item_bytes, before, after = versions
    delta = encode_delta(before, after, item_bytes=item_bytes)
    if data.draw(st.booleans()):
        damaged = delta[: data.draw(st.integers(0, len(delta) - 1))]
    else:
        flipped = bytearray(delta)
        flipped[data.draw(st.integers(0, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        damaged = bytes(flipped)
    target = tensor_of(before, item_bytes)
    with pytest.raises(ValueError, match=r"delta"):
        apply_delta(target, damaged)
    assert target.view(torch.uint8).numpy().tobytes() == before.tobytes()


def bits(values: list[int]) -> Bytes:
    return np.array(values, "<u2").view(np.uint8)


def test_signed_zeros_infinities_and_nan_payloads_come_through_as_they_are() -> None:
    before = bits([0x0000, 0x8000, 0x7F80, 0x7FC0, 0x7FC0, 0x3F80])
    after = bits([0x8000, 0x0000, 0xFF80, 0x7FC1, 0xFFC0, 0x3F80])
    assert applied(before, encode_delta(before, after, item_bytes=2), 2) == after.tobytes()


def test_one_step_of_one_number_in_many_costs_a_gap_and_a_step() -> None:
    before = bits([0x3C00] * 10_000)
    after = before.copy()
    after.view("<u2")[[3, 500, 9_999]] += 1
    delta = parse_delta(encode_delta(before, after, item_bytes=2))
    assert (delta.positions_as, delta.values_as) == (Positions.GAPS, Values.STEPS)
    # 3 | 496 = 255 + 241 | 9498 = 37 * 255 + 63
    assert delta.positions == bytes([3, 255, 241, *[255] * 37, 63])
    assert delta.values == b"\x01\x01\x01"


def test_a_gap_of_exactly_the_escape_is_read_as_one() -> None:
    before = np.zeros(2 * 600, np.uint8)
    after = before.copy()
    after.view("<u2")[[255, 511]] = 1
    delta = encode_delta(before, after, item_bytes=2)
    assert parse_delta(delta).positions == bytes([255, 0, 255, 0])
    assert applied(before, delta, 2) == after.tobytes()


def test_many_changes_are_a_bitmap_and_far_numbers_are_written_out() -> None:
    before = bits([0x3C00] * 80)
    after = before.copy()
    after.view("<u2")[::4] += 1
    after.view("<u2")[0] = 0xBC00
    delta = parse_delta(encode_delta(before, after, item_bytes=2))
    assert (delta.positions_as, delta.values_as) == (Positions.BITMAP, Values.STEPS)
    assert delta.positions == bytes([0b00010001] * 10)
    assert delta.values == b"\x80" + b"\x01" * 19 + b"\x00\xbc"


def test_a_completely_changed_parameter_is_sent_in_full() -> None:
    before, after = bits([1] * 50), bits(list(range(1000, 51000, 1000)))
    delta = parse_delta(encode_delta(before, after, item_bytes=2))
    assert delta.values_as is Values.WHOLE
    assert delta.values == after.tobytes()


def a_delta(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "positions_as": Positions.GAPS,
        "values_as": Values.STEPS,
        "item_bytes": 2,
        "num_elements": 4,
        "num_changed": 2,
        "positions": b"\x00\x01",
        "values": b"\x01\x01",
    }
    return Delta(**(fields | changes)).to_bytes()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: a_delta(num_elements=5), "5 elements of 2 bytes was received for a parameter with 4 elements of 2"),
        (lambda: a_delta(item_bytes=4), "4 elements of 4 bytes"),
        (lambda: a_delta(item_bytes=3), "contradicts itself"),
        (lambda: a_delta(positions=b"\x00\x05"), "changes element 6 of 4"),
        (lambda: a_delta(positions=b"\x00"), "has 1 positions"),
        (lambda: a_delta(positions=b"\x00\x01\xff"), "cut off"),
        (lambda: a_delta(values=b"\x01"), "1 bytes of steps for 2 elements"),
        (lambda: a_delta(values=b"\x80\x01"), "0 bytes of values for 1 elements"),
        (lambda: a_delta(values=b"\x01\x01\x01"), "1 bytes of values for 0 elements"),
        (lambda: a_delta(values_as=Values.RAW), "2 bytes of values for 2 elements"),
        (lambda: a_delta(positions_as=Positions.BITMAP), "bitmap of 2 bytes was received for 4"),
        (lambda: a_delta(positions_as=Positions.BITMAP, positions=b"\x11"), "with 2 changes has 1 bits set"),
        (lambda: a_delta(values_as=Values.WHOLE, positions=b"", values=bytes(8)), "contradicts itself"),
        (lambda: a_delta(values_as=Values.WHOLE, num_changed=4, values=bytes(8)), "contradicts itself"),
    ],
)
def test_a_delta_that_contradicts_itself_is_refused_though_its_crc_is_right(
    make: Callable[[], bytes], complaint: str
) -> None:
    target = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=complaint):
        apply_delta(target, make())
    assert not target.any()
