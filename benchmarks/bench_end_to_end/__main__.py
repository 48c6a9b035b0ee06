"""Whole GRPO runs of headrace beside TRL's: ``python -m benchmarks.bench_end_to_end``.

    each round, each side in turn:  TRL plain | TRL with vLLM | headrace at each max_staleness
    once a work:                    decoding alone, model math alone --> the limit of two cores

All sides begin with the same weights and train on the same prompts in the same order, with the same batch, settings and
reward function. TRL gets the better of one and two torch threads, which is tried before the first round. The last line
is one JSON object.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bench_end_to_end.measured import Bare, Measured, Rounds, async_over_sync, rotated
from benchmarks.bench_end_to_end.table import summary, table
from benchmarks.bench_end_to_end.works import WORKS, Work

TRL, TRL_VLLM = "TRL", "TRL with vLLM"
OURS = 2
"""headrace's max_staleness beside TRL, its default."""
_BARE_BATCHES = 5
_THREADS = (1, 2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_end_to_end", description="Whole runs of headrace and TRL, in turn"
    )
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS), help="works (all)")
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which each side makes a run (5)")
    parser.add_argument("--steps", type=int, help="measured steps of a run, after the warm-up steps (the work's)")
    parser.add_argument("--skip-vllm", action="store_true", help="leave TRL with a vLLM server out")
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="*",
        default=[0, 1, 2, 4],
        metavar="STEPS",
        help="headrace's max_staleness values",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of models, data and runs (0)")
    parser.add_argument(
        "--directory", type=Path, default=Path(".headrace/bench-end-to-end"), help="where models and logs are kept"
    )
    arguments = parser.parse_args(argv)
    if arguments.pairs < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--pairs and --steps must be at least 1")
    if any(bound < 0 for bound in arguments.staleness):
        parser.error("--staleness must not be negative")
    return arguments


def staleness_sides(bounds: Sequence[int]) -> dict[int, str]:
    """Return headrace's sides by max_staleness; the one beside TRL is always among them."""
    return {bound: f"headrace, max_staleness {bound}" for bound in sorted({OURS, *bounds})}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and end with one line of JSON."""
    arguments = parse(argv)
    now = time.strftime("%Y-%m-%d %H:%M")
    _say(f"{now}: {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.work:
        results[name] = measure(WORKS[name], arguments)
    names = ("over_trl", "over_trl_vllm", "share_of_limit", "async_over_sync")
    last = {number: {work: found[number] for work, found in results.items()} for number in names}
    print(
        json.dumps({**last, "pairs": arguments.pairs, "works": {name: found["all"] for name, found in results.items()}})
    )
    return 0


def measure(work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one work, and print its table."""
    num_steps = arguments.steps or work.num_steps
    bench = _Bench(work, arguments.directory.absolute() / work.name, num_steps=num_steps, seed=arguments.seed)
    bench.prepare()
    sides = staleness_sides(arguments.staleness)
    trls = [TRL] if arguments.skip_vllm else [TRL, TRL_VLLM]
    threads = {side: bench.better_threads(side) for side in trls}
    rounds = Rounds()
    for number in range(arguments.pairs):
        for side in rotated([*trls, *sides.values()], number):
            where = f"round {number + 1} of {arguments.pairs}, {side}"
            run = bench.trl(side, threads[side]) if side in threads else bench.headrace(side, sides)
            rounds.add(side, run)
            _say(f"{work.name}, {where}: {_line(run)}")
    bare = bench.bare()
    print(table(work, rounds, bare=bare, threads=threads), flush=True)
    return {
        "over_trl": rounds.over(sides[OURS], TRL),
        "over_trl_vllm": rounds.over(sides[OURS], TRL_VLLM),
        "share_of_limit": rounds.median(sides[OURS], bare.share_of_limit),
        "async_over_sync": async_over_sync(rounds, sides),
        "all": summary(work, rounds, bare=bare, threads=threads),
    }


class _Bench:
    """The sides of one work, and the directory with its model, data and logs."""

    def __init__(self, work: Work, directory: Path, *, num_steps: int, seed: int) -> None:
        self._work, self._num_steps, self._seed = work, num_steps, seed
        self._data = directory / f"seed-{seed}"
        self._runs = directory / time.strftime("%Y%m%d-%H%M%S")
        self._count = 0

    def prepare(self) -> None:
        """Make the work's model and data, unless an earlier benchmark has made them."""
        from benchmarks.bench_end_to_end.processes import run_child

        if (self._data / "models" / "result.json").is_file():
            return
        self._data.mkdir(parents=True, exist_ok=True)
        task = {"work": self._work.name, "directory": str(self._data), "seed": self._seed}
        found = run_child("benchmarks.bench_end_to_end.models", task, self._data / "models")
        _say(f"{self._work.name}: made the model: {found}")

    def better_threads(self, side: str) -> int:
        """Return the number of torch threads with which TRL is faster, in a run with few steps."""
        few = max(1, min(self._num_steps, self._work.num_steps // 8))
        rates = {threads: self.trl(side, threads, num_steps=few).tokens_per_s() for threads in _THREADS}
        better = max(rates, key=rates.__getitem__)
        tried = ", ".join(f"{rate:.0f} tokens/s with {threads}" for threads, rate in rates.items())
        _say(f"{self._work.name}, {side}, torch threads: {tried}; {better} from now on")
        return better

    def trl(self, side: str, threads: int, *, num_steps: int | None = None) -> Measured:
        """Make a run with TRL."""
        from benchmarks.bench_end_to_end import trl_side

        run, model = trl_side.run(
            self._work, self._data, self._next("trl"), num_steps=num_steps or self._num_steps, threads=threads,
            has_vllm=side == TRL_VLLM, seed=self._seed,
        )  # fmt: skip
        return self._with_accuracy(run, model)

    def headrace(self, side: str, sides: Mapping[int, str]) -> Measured:
        """Make a run with headrace."""
        from benchmarks.bench_end_to_end import headrace_side

        bound = next(bound for bound, name in sides.items() if name == side)
        run, model = headrace_side.run(
            self._work, self._data, self._next("headrace"), num_steps=self._num_steps, max_staleness=bound,
            seed=self._seed,
        )  # fmt: skip
        return self._with_accuracy(run, model)

    def bare(self) -> Bare:
        """Measure decoding and math alone."""
        from benchmarks.bench_end_to_end import bare

        num_batches = min(_BARE_BATCHES, self._num_steps)
        return bare.measure(self._work, self._data, self._next("bare"), num_batches=num_batches, seed=self._seed)

    def _next(self, kind: str) -> Path:
        self._count += 1
        directory = self._runs / f"{self._count:02d}-{kind}"
        directory.mkdir(parents=True)
        return directory

    def _with_accuracy(self, run: Measured, model: Path) -> Measured:
        if self._work.shape is not None:
            return run
        from headrace.demo.apart import evaluate

        return replace(run, accuracy=evaluate(self._data, model)["accuracy"])


def _line(run: Measured) -> str:
    accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.3f}"
    return (
        f"{run.tokens_per_s():.0f} tokens/s, {run.steps_per_s():.3f} steps/s, {run.seconds():.1f} s, "
        f"CPU {run.cpu_s:.1f} s, reward {run.steps[0].reward:.3f} -> {run.steps[-1].reward:.3f}{accuracy}"
    )


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
