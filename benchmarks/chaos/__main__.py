"""`python -m benchmarks.chaos`: injects random faults into a whole `headrace up`, and checks that nothing is lost.

Prints progress, at the end a table by victim and fault, and in the last line JSON with the totals. Writes one JSON file
for each seed. Exits with 1 if a promise was broken, a run stalled, or a process was left behind; otherwise with 0.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos import record, schedule, state_disk, table, workload
from benchmarks.chaos.trial import STAND_S, Plan, Trial
from shared.version import VERSION

_UNLIMITED = 1 << 30
_MINUTES = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run the trials, or add up earlier ones."""
    arguments = _parser().parse_args(argv)
    if arguments.table:
        _print_end(record.read_all(arguments.table))
        return 0
    own_disk = state_disk.enter("benchmarks.chaos", sys.argv[1:] if argv is None else argv)
    cells = _cells(arguments.only, engine=arguments.engine, has_tool=arguments.tools, own_disk=own_disk)
    left_out = [] if own_disk else ["disk full: this user may not create a mount namespace"]
    for what in left_out:
        print(f"left out: {what}", flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    trials: list[record.TrialRecord] = []
    for seed in arguments.seeds:
        found = record.TrialRecord(seed, arguments.engine, _release(), left_out=left_out)
        trials.append(found)
        with tempfile.TemporaryDirectory(prefix=f"headrace-chaos-{seed}-", ignore_cleanup_errors=True) as directory:
            plan = Plan(
                seed=seed,
                engine=arguments.engine,
                seconds=_seconds(arguments.minutes, num_faults=arguments.faults),
                num_faults=arguments.faults or _UNLIMITED,
                max_steps=arguments.max_steps,
                has_tool=arguments.tools,
                cells=cells,
                own_disk=own_disk,
                directory=Path(directory),
                results=arguments.results.resolve(),
                stand_s=arguments.stand_s or STAND_S[arguments.engine],
            )
            print(f"seed {seed}: {arguments.engine} generators, {len(cells)} kinds of faults", flush=True)
            try:
                Trial(plan, found, say=_say).run()
            finally:
                found.write(arguments.results / f"chaos-{arguments.engine}-seed-{seed}.json")
    _print_end(trials)
    return 1 if any(trial.is_broken for trial in trials) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        help="minutes of strikes for each seed (10; no limit with --faults)",
    )
    parser.add_argument("--faults", type=int, metavar="N", help="end each seed after N faults")
    parser.add_argument("--seed", type=_seeds, dest="seeds", default=[0], metavar="N", help="seed of the schedule (0)")
    parser.add_argument("--seeds", type=_seeds, metavar="A-B", help="run the seeds A to B, one after the other")
    parser.add_argument("--engine", choices=(workload.SIMULATED, workload.VLLM), default=workload.SIMULATED)
    parser.add_argument(
        "--max-steps", type=int, default=400, metavar="N", help="optimizer steps of a run, before the next begins (400)"
    )
    parser.add_argument(
        "--tools", action="store_true", help="runs have a tool: sessions and tool workers are victims too"
    )
    limits = ", ".join(f"{seconds:g} with {engine}" for engine, seconds in STAND_S.items())
    parser.add_argument(
        "--stand-s", type=float, metavar="S", help=f"seconds without a step until a run has stalled ({limits})"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("chaos"),
        metavar="DIR",
        help="directory for JSON files and stalled runs (chaos)",
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only faults with TEXT in VICTIM: FAULT; may be repeated"
    )
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="add up earlier trials, and run none")
    return parser


def _seconds(minutes: float | None, *, num_faults: int | None) -> float:
    """Return how long a seed strikes at most."""
    if minutes is None:
        return float("inf") if num_faults else _MINUTES * 60
    return minutes * 60


def _print_end(trials: list[record.TrialRecord]) -> None:
    print(table.tables(trials))
    print(json.dumps(table.sums(trials)), flush=True)


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _cells(only: list[str] | None, *, engine: str, has_tool: bool, own_disk: bool) -> list[tuple[str, str]]:
    absent = {schedule.ENGINE} if engine == workload.SIMULATED else set[str]()
    absent |= set() if has_tool else {schedule.SESSIONS, schedule.TOOL_WORKER}
    cells = [
        (victim, kind)
        for victim, kind in schedule.CELLS
        if victim not in absent and (own_disk or kind != schedule.DISK_FULL)
    ]
    chosen = [cell for cell in cells if only is None or any(text in ": ".join(cell) for text in only)]
    if not chosen:
        raise SystemExit(f"no fault matches {only}; known faults: {', '.join(': '.join(cell) for cell in cells)}")
    return chosen


def _release() -> str:
    """Return the version, with the commit if there is one."""
    repository = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(repository), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"{VERSION} {found}".strip()


def _end_in_order(number: int, _: object) -> None:
    sys.exit(128 + number)


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_in_order)
    sys.exit(main())
