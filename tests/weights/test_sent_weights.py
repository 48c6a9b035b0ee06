"""The trainer's copy of the sent weights: it gives the changes since then, and restores the set that was taken."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from services.generator.worker.staged_weights import StagedWeights, apply_delta
from services.trainer.push.packing import announce
from services.trainer.push.sent_weights import SentWeights
from shared.errors import PushError
from shared.weights.parameter_spec import total_bytes

pytestmark = pytest.mark.unit

Named = list[tuple[str, torch.Tensor]]


def weights(seed: int) -> Named:
    torch.manual_seed(seed)
    return [
        ("wide", torch.randn(70, 33).to(torch.bfloat16)),
        ("scalar", torch.randn(())),
        ("turned", torch.randn(8, 16).T),
        ("empty", torch.zeros(0, 5)),
        ("codes", torch.randint(-100, 100, (40,), dtype=torch.int8)),
    ]


def changed(before: Named) -> Named:
    after = [(name, tensor.clone()) for name, tensor in before]
    after[0][1][3, 7] *= 1.01
    after[4][1][11] += 1
    return after


def staged_of(named: Named) -> StagedWeights:
    announced = announce(named)
    staged = StagedWeights(announced)
    for name, tensor in named:
        staged.put(name, tensor)
    return staged


def test_the_first_version_is_sent_in_full_and_the_next_as_what_changed() -> None:
    first = weights(1)
    announced = announce(first)
    sent = SentWeights()
    parcel = sent.update(first, announced, policy_version=0)
    assert (parcel.encoding, parcel.sizes, parcel.num_bytes) == ("full", None, total_bytes(announced))
    assert all(torch.equal(tensor, theirs) for (_, tensor), (_, theirs) in zip(parcel.tensors(), first, strict=True))
    staged = staged_of(first)
    assert parcel.checksum == staged.checksum()

    second = changed(first)
    parcel = sent.update(second, announced, policy_version=1)
    assert parcel.encoding == "delta"
    assert parcel.base_checksum == staged.checksum()
    assert parcel.num_bytes < total_bytes(announced) / 5
    assert parcel.travelling == announce(parcel.tensors())
    for name, delta in parcel.tensors():
        apply_delta(staged.tensors[name], delta.numpy().tobytes())
        staged.changed(name)
    assert parcel.checksum == staged.checksum() == staged_of(second).checksum()


def test_a_version_sent_as_a_delta_can_be_sent_again_in_full() -> None:
    first = weights(1)
    announced = announce(first)
    sent = SentWeights()
    sent.update(first, announced, policy_version=0)
    second = changed(first)
    delta = sent.update(second, announced, policy_version=1)
    full = sent.full()
    assert full.checksum == delta.checksum
    assert all(torch.equal(tensor, theirs) for (_, tensor), (_, theirs) in zip(full.tensors(), second, strict=True))


def test_a_version_that_was_not_read_completely_is_not_a_base() -> None:
    first = weights(1)
    announced = announce(first)
    sent = SentWeights()
    sent.update(first, announced, policy_version=0)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield first[0][0], first[0][1] * 2
        raise PushError("a rank is gone")

    with pytest.raises(PushError, match="a rank is gone"):
        sent.update(breaks_off(), announced, policy_version=1)
    assert sent.update(first, announced, policy_version=1).encoding == "full"


def test_other_parameters_than_before_are_sent_in_full() -> None:
    first = weights(1)
    sent = SentWeights()
    sent.update(first, announce(first), policy_version=0)
    fewer = first[:3]
    parcel = sent.update(fewer, announce(fewer), policy_version=1)
    assert parcel.encoding == "full"
    assert parcel.checksum == staged_of(fewer).checksum()
