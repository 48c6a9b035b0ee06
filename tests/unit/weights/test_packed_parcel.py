"""The chunks of a push: the first can be packed beforehand, and what goes wrong then is said where it is waited for."""

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from services.trainer.push.packed_parcel import PackedParcel
from services.trainer.push.packing import Weights, announce
from services.trainer.push.parcel import Parcel
from shared.errors import PushError

NAMED = {"one": torch.arange(8.0), "two": torch.arange(8.0) + 8, "three": torch.ones(2)}
ANNOUNCED = announce(NAMED.items())


def packed(weights: Weights = NAMED.items) -> PackedParcel:
    parcel = Parcel(3, ANNOUNCED, "full", weights, ANNOUNCED.num_bytes)
    return PackedParcel(parcel, buffer_bytes=16)


def test_chunks_are_the_same_in_the_same_order_whether_or_not_the_first_is_packed_beforehand() -> None:
    plain, ahead = packed(), packed()
    ahead.pack_first()
    chunks = list(ahead.chunks(timeout_s=10))
    assert [chunk.numel() for chunk in chunks] == [32, 32, 8]
    assert all(map(torch.equal, chunks, plain.chunks(timeout_s=10)))
    assert ahead.checksum() == plain.checksum()


def test_only_the_first_chunk_is_packed_beforehand() -> None:
    read: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in NAMED.items():
            read.append(name)
            yield name, tensor

    ahead = packed(weights)
    ahead.pack_first()
    chunks = ahead.chunks(timeout_s=10)
    next(chunks)
    assert read == ["one"]
    assert len(list(chunks)) == 2
    assert read == ["one", "two", "three"]


def test_weights_that_are_not_what_was_announced_are_refused_where_they_are_waited_for() -> None:
    ahead = packed(lambda: {"other": torch.ones(8)}.items())
    ahead.pack_first()
    with pytest.raises(PushError, match="announced"):
        next(ahead.chunks(timeout_s=10))


def test_a_first_chunk_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    may_go_on = threading.Event()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        may_go_on.wait(30)
        yield from NAMED.items()

    ahead = packed(weights)
    ahead.pack_first()
    try:
        with pytest.raises(PushError, match="deadline"):
            next(ahead.chunks(timeout_s=0.05))
    finally:
        may_go_on.set()
