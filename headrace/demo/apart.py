"""Makes the demo's model and data, and evaluates models, for services that run elsewhere, such as in containers.

    python -m headrace.demo.apart make DIRECTORY              writes DIRECTORY/model, train.jsonl and test.jsonl
    python -m headrace.demo.apart evaluate DIRECTORY MODEL    prints a model's greedy accuracy on DIRECTORY/test.jsonl

The last output line of each command is JSON. The run file of the training between the two is deploy/demo/run.json.
"""

import argparse
import json
import sys
from pathlib import Path

from headrace.demo import task


def make(directory: Path, *, seed: int) -> dict[str, float]:
    """Write data and a warmed-up model to ``directory``, and return the warm-up's steps, seconds and test accuracy."""
    from headrace.demo.warmup import warm_up

    splits = task.make_splits(seed)
    directory.mkdir(parents=True, exist_ok=True)
    task.write_jsonl(directory / "train.jsonl", splits.train)
    task.write_jsonl(directory / "test.jsonl", splits.test)
    last = warm_up(directory / "model", splits, seed=seed)
    return {"steps": last.step, "seconds": round(last.seconds, 1), **evaluate(directory, directory / "model")}


def evaluate(directory: Path, model: Path) -> dict[str, float]:
    """Return a model's greedy accuracy (0 to 1) on the test split, which no training uses, and the split's size."""
    from headrace.demo.evaluate import greedy_accuracy

    rows = [json.loads(line) for line in (directory / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy, _ = greedy_accuracy(model, [row["prompt"] for row in rows], [row["answer"] for row in rows])
    return {"accuracy": accuracy, "prompts": len(rows)}


def main(arguments: list[str] | None = None) -> int:
    """Run `make` or `evaluate` with command-line arguments, and print JSON. Return 0, or 1 for a missing file."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.demo.apart", description="The demo: make its model and data, or evaluate a model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("directory", type=Path)
    making.add_argument("--seed", type=int, default=0)
    evaluating = commands.add_parser("evaluate")
    evaluating.add_argument("directory", type=Path)
    evaluating.add_argument("model", type=Path)
    given = parser.parse_args(arguments)
    try:
        is_to_make = given.command == "make"
        found = make(given.directory, seed=given.seed) if is_to_make else evaluate(given.directory, given.model)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        hint = "; `make` writes it" if isinstance(error, FileNotFoundError) and given.command == "evaluate" else ""
        sys.stderr.write(f"{parser.prog} {given.command}: {place}{error.strerror or error}{hint}\n")
        return 1
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
