"""Sends bad messages to every decoder: ``python -m tests.fuzz.run --cases 1000000 --seed 0``.

The exit status is 1 if there was a surprise: any exception but the decoder's own refusal, a decision that takes longer
than a second, or an accepted message that violates an invariant (invariants.py shares no code with the decoders).
"""

import argparse
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fuzz.decoders import Decoder, all_decoders

_SLOW_S = 1.0
_MAX_MEMORY_BYTES = 4 << 30
"""Memory limit: a decoder that wants more is reported as a surprise, and does not take down the machine."""
_MAX_TOLD = 20


@dataclass
class Report:
    """The results of the cases."""

    cases: Counter[str] = field(default_factory=Counter[str])
    accepted: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    surprises: list[str] = field(default_factory=list[str])


def fuzz(*, cases: int, seed: int, decoders: Sequence[Decoder]) -> Report:
    """Make this many bad messages, the same for the same seed, and give each to its decoder."""
    chance, report = random.Random(seed), Report()
    weights = [decoder.weight for decoder in decoders]
    began_at = time.monotonic()
    for number in range(cases):
        (decoder,) = chance.choices(decoders, weights)
        data = decoder.make(decoder.seeds, chance)
        report.cases[decoder.name] += 1
        surprise = _surprise(decoder, data, report)
        if surprise:
            report.surprises.append(f"case {number}, {decoder.name}: {surprise}; the message: {data[:4000]!r}")
    report.seconds = time.monotonic() - began_at
    return report


def _surprise(decoder: Decoder, data: bytes, report: Report) -> str:
    """Return the surprise of one case, or an empty string."""
    began_at = time.process_time()
    try:
        decoder.decode(data)
    except decoder.refusal:
        return _slow(began_at)
    except Exception as error:  # noqa: BLE001  it is what is looked for
        return f"{type(error).__name__}: {error}"
    report.accepted[decoder.name] += 1
    if slow := _slow(began_at):
        return slow
    if decoder.read is None:
        return ""
    try:
        return "accepted although " + ", ".join(wrong) if (wrong := list(decoder.ask(decoder.read(data)))) else ""
    except Exception as error:  # noqa: BLE001  what was accepted cannot even be asked
        return f"accepted, and cannot be asked: {type(error).__name__}: {error}"


def _slow(began_at: float) -> str:
    took_s = time.process_time() - began_at
    return f"it took {took_s:.1f} s" if took_s > _SLOW_S else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz, and print the results."""
    parser = argparse.ArgumentParser(description="Throw bad messages at every decoder.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="decoders whose name has this in it")
    arguments = parser.parse_args(argv)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    decoders = [decoder for decoder in all_decoders() if arguments.only in decoder.name]
    report = fuzz(cases=arguments.cases, seed=arguments.seed, decoders=decoders)
    for name, count in sorted(report.cases.items()):
        sys.stdout.write(f"{name:18} {count:9,} cases {report.accepted[name]:9,} accepted\n")
    for surprise in report.surprises[:_MAX_TOLD]:
        sys.stdout.write(f"SURPRISE {surprise}\n")
    sys.stdout.write(
        f"{arguments.cases:,} cases, seed {arguments.seed}: {len(report.surprises)} surprises, "
        f"{sum(report.accepted.values()):,} accepted, {arguments.cases / report.seconds:,.0f} cases/s\n"
    )
    return 1 if report.surprises else 0


if __name__ == "__main__":
    sys.exit(main())
