"""``python -m benchmarks.bench_staleness``: the demo task at max_staleness 0, 1, 4 and 8, with and without correction.

Prompts are admitted eagerly, so that groups become as stale as allowed. Prints a table of final held-out accuracy, wall
time and actual staleness. The last line is one JSON object. Uses real services, and takes about two and a half minutes
a run on two cores.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.bench_staleness.picture import CORRECTION, draw
from benchmarks.demo_runs import DemoResult, DemoRun, add_arguments, run_all, steps_to

BOUNDS = (0, 1, 4, 8)
_BEGIN, _END = "<!-- begin of the table", "<!-- end of the table -->"
_FILLED = re.compile(rf"({_BEGIN}[^\n]*-->).*?{_END}", re.DOTALL)
UNCORRECTED = {CORRECTION: False, "vllm_importance_sampling_mode": None, "vllm_importance_sampling_clip_max": None}
"""Without the correction, the demo's bounds of its weights are removed too."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_staleness", description=__doc__)
    add_arguments(parser, directory=".headrace/bench-staleness")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=BOUNDS, metavar="STEPS", help="values of max_staleness"
    )
    parser.add_argument("--page", type=Path, metavar="MD", help="page to put the table into, with a picture beside it")
    arguments = parser.parse_args(argv)
    runs = [
        DemoRun(
            f"max_staleness-{bound}-{'corrected' if is_corrected else 'uncorrected'}",
            {"max_staleness": bound, "admission": "eager", **({CORRECTION: True} if is_corrected else UNCORRECTED)},
        )
        for bound in arguments.bounds
        for is_corrected in (True, False)
    ]
    results = run_all(runs, arguments)
    sys.stdout.write(table(results))
    if arguments.page is not None:
        draw(results, arguments.page.with_suffix(".png"))
        write_page(arguments.page, table(results))
    sys.stdout.write(json.dumps({"seed": arguments.seed, "runs": [summary(result) for result in results]}) + "\n")
    return 0 if all(result.outcome for result in results) else 1


def table(results: list[DemoResult]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| max_staleness | correction | accuracy before | after | steps to 0.8 | run, s | staleness mean | max |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        bound, correction = result.settings["max_staleness"], _correction(result)
        if not result.outcome:
            lines.append(f"| {bound} | {correction} | {result.failure} | | | | | |")
            continue
        outcome = result.outcome
        reached = steps_to(result, 0.8)
        lines.append(
            f"| {bound} | {correction} | {outcome['accuracy_before']:.3f} | {outcome['accuracy_after']:.3f} "
            f"| {reached if reached is not None else 'never'} | {outcome['run_seconds']:.0f} "
            f"| {outcome['staleness_mean']:.2f} | {outcome['staleness_max']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def write_page(page: Path, filling: str) -> None:
    """Write the table between the two marks of a page, with the picture of the same name below it."""
    text = page.read_text(encoding="utf-8")
    found = _FILLED.search(text)
    if found is None:
        raise SystemExit(f"{page} has no place for the table: {_BEGIN} --> ... {_END}")
    picture = f"![mean reward of each run over its steps]({page.stem}.png)"
    filled = f"{found[1]}\n\n{filling}\n{picture}\n\n{_END}"
    page.write_text(text.replace(found[0], filled), encoding="utf-8")


def summary(result: DemoResult) -> dict[str, object]:
    """Return one run's entry in the last line."""
    wanted = ("accuracy_before", "accuracy_after", "run_seconds", "steps", "staleness_mean", "staleness_max")
    return {
        "max_staleness": result.settings["max_staleness"],
        "corrected": result.settings[CORRECTION],
        **{name: result.outcome.get(name) for name in wanted},
        "steps_to_reward_0.8": steps_to(result, 0.8),
        "failure": result.failure,
    }


def _correction(result: DemoResult) -> str:
    return "yes" if result.settings[CORRECTION] else "no"


if __name__ == "__main__":
    sys.exit(main())
