"""A short run of ``make fuzz``, and a check that it finds what it looks for."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shared.messages import ScoredGroup, encode
from tests.fuzz import invariants, msgpack_reader
from tests.fuzz.decoders import Decoder, all_decoders
from tests.fuzz.run import fuzz
from tests.groups import scored_group

DECODERS = {decoder.name: decoder for decoder in all_decoders()}


@pytest.mark.timeout(300)
def test_no_decoder_is_surprised_and_what_is_accepted_satisfies_the_invariants() -> None:
    report = fuzz(cases=20_000, seed=0, decoders=list(DECODERS.values()))
    assert report.surprises == []
    assert set(report.accepted) == set(report.cases) == set(DECODERS), "every decoder gets a message to accept"
    of_groups = [name for name in DECODERS if name.endswith("group")]
    assert all(report.cases[name] > 1.5 * report.accepted[name] for name in of_groups), (
        "every decoder gets a message to refuse"
    )


@pytest.mark.parametrize("name", DECODERS)
def test_good_messages_are_accepted_and_satisfy_the_invariants(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds:
        decoder.decode(seed)
        if decoder.read is not None:
            assert list(decoder.ask(decoder.read(seed))) == []


def test_a_decoder_that_looks_at_nothing_is_found_out() -> None:
    """If a decoder accepts whatever msgspec accepts, wrong messages are reported. So are unexpected exceptions."""
    careless = replace(
        DECODERS["scored group"],
        decode=msgspec.msgpack.decode,
        refusal=(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
    )
    surprises = fuzz(cases=4_000, seed=0, decoders=[careless]).surprises
    for sign in ("negative", "a branch is missing", "tile", "turn", "no logprob", "with value", "num_generations"):
        assert any(sign in surprise for surprise in surprises), sign
    leaky = replace(DECODERS["scored group"], refusal=ZeroDivisionError)
    assert any("MessageError" in surprise for surprise in fuzz(cases=100, seed=0, decoders=[leaky]).surprises)


def test_the_same_seed_makes_the_same_messages() -> None:
    decoder: Decoder = DECODERS["completed group"]
    first, second = (
        [decoder.make(decoder.seeds, chance) for _ in range(50)] for chance in (random.Random(3), random.Random(3))
    )
    assert first == second


def test_our_reader_of_msgpack_reads_what_the_library_wrote() -> None:
    def values() -> Iterator[Any]:
        for power in (0, 5, 6, 7, 8, 15, 16, 31, 32, 63):
            yield from (2**power - 1, 2**power, -(2**power))
        for size in (0, 1, 15, 16, 31, 32, 255, 256, 65_536):
            yield from ("x" * size, b"x" * size, [1] * size, {str(number): None for number in range(size)})
        yield from (None, True, False, 0.5, -1e300, "\u00e9")

    for value in values():
        assert msgpack_reader.read(msgspec.msgpack.encode(value)) == value
    group: ScoredGroup = scored_group()
    assert list(invariants.scored_group(msgpack_reader.read(encode(group)))) == []
