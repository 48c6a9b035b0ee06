"""The table of a work, and its entry in the last line. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.bench_end_to_end.measured import Bare, Measured, Rounds
from benchmarks.bench_end_to_end.works import Work

Number = Callable[[Measured], "float | None"]


def numbers(work: Work, bare: Bare) -> dict[str, Number]:
    """Return the numbers of a run, by name."""
    return {
        "tokens_per_s": Measured.tokens_per_s,
        "steps_per_s": Measured.steps_per_s,
        "cpu_s_per_1000_tokens": lambda run: 1000 * run.cpu_s / run.num_tokens(),
        "seconds_to_reward": lambda run: run.seconds_to(work.target_reward, smooth_steps=work.smooth_steps),
        "final_reward": lambda run: run.final_reward(smooth_steps=work.smooth_steps),
        "accuracy": lambda run: run.accuracy,
        "share_of_limit": bare.share_of_limit,
        "staleness": lambda run: run.staleness,
        "tokens_a_completion": lambda run: run.num_tokens() / (len(run.steps) - run.num_warmup_steps) / work.num_rows,
        "longest": lambda run: run.longest,
    }


def summary(work: Work, rounds: Rounds, *, bare: Bare, threads: Mapping[str, int]) -> dict[str, Any]:
    """Return the medians of every side, and what was measured alone."""
    of_sides = {
        side: {
            name: None if (median := rounds.median(side, number)) is None else float(f"{median:.4g}")
            for name, number in numbers(work, bare).items()
        }
        for side in rounds.by_side
    }
    return {
        "rounds": max((len(runs) for runs in rounds.by_side.values()), default=0),
        "threads": dict(threads),
        "decoding_cpu_s_per_1000_tokens": float(f"{1000 * bare.decoding_s_per_token:.4g}"),
        "math_cpu_s_per_1000_tokens": float(f"{1000 * bare.math_s_per_token:.4g}"),
        "sides": of_sides,
    }


def table(work: Work, rounds: Rounds, *, bare: Bare, threads: Mapping[str, int]) -> str:
    """Return the medians as a Markdown table."""
    lines = [
        f"\n{work.name}: medians over {summary(work, rounds, bare=bare, threads=threads)['rounds']} rounds\n",
        "| side | tokens/s | steps/s | CPU s / 1,000 tokens | share of the limit "
        f"| s to reward {work.target_reward:g} | final reward | accuracy | staleness | mean length | longest |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    found = numbers(work, bare)
    for side in rounds.by_side:
        name = f"{side}, torch threads {threads[side]}" if side in threads else side
        cells = [
            _cell(rounds.median(side, found[number]), digits)
            for number, digits in (
                ("tokens_per_s", 0), ("steps_per_s", 3), ("cpu_s_per_1000_tokens", 2), ("share_of_limit", 3),
                ("seconds_to_reward", 1), ("final_reward", 3), ("accuracy", 3), ("staleness", 2),
                ("tokens_a_completion", 1), ("longest", 0),
            )
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(
        f"\nalone: decoding {1000 * bare.decoding_s_per_token:.3f} and model math {1000 * bare.math_s_per_token:.3f} "
        "CPU seconds for 1,000 tokens"
    )
    return "\n".join(lines) + "\n"


def _cell(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:,.{digits}f}"
