"""Both ends cut the same chunks, and the sent parameters are the announced ones."""

import pytest

pytest.importorskip("torch")

import torch

from services.generator.worker.weight_wires import unpack
from services.trainer.push.packing import announce, difference, pack
from shared.errors import PushError
from shared.weights.parameter_spec import cut

pytestmark = pytest.mark.unit


def named() -> list[tuple[str, torch.Tensor]]:
    """Return parameters of 8, 6, 4, 0 and 12 bytes."""
    return [
        ("a", torch.tensor([1.0, 2.0])),
        ("b", torch.tensor([3.0, 4.0, 5.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(6.0)),
        ("empty", torch.empty(0)),
        ("d", torch.tensor([[7.0], [8.0], [9.0]])),
    ]


def test_a_chunk_ends_with_the_parameter_that_takes_it_past_the_buffer() -> None:
    chunks = list(pack(named(), announce(named()), buffer_bytes=10))
    assert [chunk.numel() for chunk in chunks] == [14, 16]  # 8 + 6 > 10; 4 + 0 + 12 > 10
    assert all(chunk.dtype is torch.uint8 for chunk in chunks)


def test_a_chunk_that_is_exactly_full_takes_one_parameter_more() -> None:
    assert [chunk.numel() for chunk in pack(named(), announce(named()), buffer_bytes=14)] == [18, 12]


def test_the_receiver_finds_every_parameter_whatever_the_buffer() -> None:
    announced = announce(named())
    for buffer_bytes in (1, 10, 14, 1000):
        specs = cut(announced, buffer_bytes)
        chunks = pack(named(), announced, buffer_bytes=buffer_bytes)
        found = {name: tensor for chunk, of in zip(chunks, specs, strict=True) for name, tensor in unpack(chunk, of)}
        assert list(found) == ["a", "b", "c", "empty", "d"]
        for name, sent in named():
            assert found[name].dtype is sent.dtype
            assert torch.equal(found[name], sent)


def test_a_transposed_parameter_is_sent_in_the_order_of_its_shape() -> None:
    transposed = [("t", torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T)]
    (chunk,) = pack(transposed, announce(transposed), buffer_bytes=1000)
    assert chunk.view(torch.float32).tolist() == [1.0, 3.0, 2.0, 4.0]


def test_no_weights_and_doubles_are_refused() -> None:
    with pytest.raises(PushError, match="no weights"):
        announce([])
    with pytest.raises(PushError, match="contain a twice"):
        announce([("a", torch.zeros(1)), ("b", torch.zeros(1)), ("a", torch.zeros(1))])


def test_weights_that_are_not_what_was_announced_are_refused() -> None:
    announced = announce(named())
    with pytest.raises(PushError, match="d was announced to the generators, but is missing"):
        list(pack(named()[:-1], announced, buffer_bytes=10))
    with pytest.raises(PushError, match="more was never announced"):
        list(pack([*named(), ("more", torch.zeros(1))], announced, buffer_bytes=10))
    with pytest.raises(PushError, match=r"but got a torch\.float64"):
        list(pack([("a", torch.zeros(2, dtype=torch.float64))], announced, buffer_bytes=10))


def test_the_first_difference_between_two_pushes_is_named() -> None:
    before = announce(named())
    assert difference(before, announce(named())) is None
    assert "1 are gone ['a']" in (difference(before, announce(named()[1:])) or "")
    reshaped = [*named()[:-1], ("d", torch.zeros(3))]
    assert "parameter d was" in (difference(before, announce(reshaped)) or "")
