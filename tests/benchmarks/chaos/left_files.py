"""The files of a run, made by hand, for tests that break one thing in them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos.history import Sighting, read_history
from benchmarks.chaos.judge import Verdict, judge

safetensors_numpy = pytest.importorskip("safetensors.numpy")
EPOCH_1, EPOCH_2 = 1 << 20, 2 << 20
G, PROMPT_TOKENS = 2, 4
PROMPTS = [f"reverse a{letter} =" for letter in "abcdefgh"]


class Files:
    """The files of a run of three steps with two groups each, and a seventh group that was dropped."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run: dict[str, Any] = {
            "run_id": "run-a",
            "status": "finished",
            "reason": "",
            "desired": "run",
            "config": {
                "groups_per_step": 2,
                "num_generations": G,
                "max_staleness": 1,
                "eval_steps": 1,
                "dataset_name": str(run_dir / "train.jsonl"),
                "eval_dataset_name": str(run_dir / "eval.jsonl"),
            },
            "progress": {
                "step": 3,
                "policy_version": 3,
                "groups_admitted": 7,
                "groups_trained": 6,
                "groups_dropped": {"stale": 1},
            },
        }
        self.ledger: dict[str, Any] = {"admitted": 7, "trained": [[0, 2], [4, 6]], "dropped": {"stale": [[3, 3]]}}
        groups = {1: [0, 1], 2: [2, 4], 3: [5, 6]}
        spans = {1: [[0, 0, 8, 1]], 2: [[0, 0, 4, 1], [1, 4, 8, 1]], 3: [[1, 0, 4, 1], [2, 4, 8, 2]]}
        self.rollouts = {
            step: [
                rollout(number, branch, spans[step], staleness=step > 1) for number in groups[step] for branch in (0, 1)
            ]
            for step in groups
        }
        # A completion of 8 tokens gets 8 % 7 and 2.
        self.metrics = [
            {
                "step": step,
                "reward": 3.0,
                "completions/mean_length": 8.0,
                "num_tokens": step * 2 * G * (8.0 + PROMPT_TOKENS),
                "staleness/max": float(step > 1),
                "groups/admitted": step + 4.0,
                "groups/trained": step * 2.0,
                "groups/dropped": float(step > 1),
                **({"groups/dropped/stale": 1.0} if step > 1 else {}),
            }
            for step in (1, 2, 3)
        ]
        self.pushes = [(EPOCH_1, 0), (EPOCH_1, 1), (EPOCH_1, 2), (EPOCH_2, 2), (EPOCH_2, 3)]
        self.sightings = [Sighting(0, 0), Sighting(2, 1), Sighting(1, 1), Sighting(3, 3)]
        # The evaluation of step 2 became due while the first one was in progress.
        self.evaluations = [
            {"step": 1, "eval_skipped": 0, "eval_groups/done": 2},
            {"step": 3, "eval_skipped": 1, "eval_groups/done": 2},
        ]
        self.evaluated = {step: [(label, branch) for label in "ab" for branch in (0, 1)] for step in (1, 3)}
        self.weights = {"w": np.ones(3, np.float32)}
        self.final_weights = self.weights
        self.adam_step = 3
        self.damage: Callable[[Path], object] = lambda checkpoint: None

    def verdict(self, *, has_ended: bool = True) -> Verdict:
        self.write(self.run_dir / "train.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
        self.write(self.run_dir / "eval.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
        self.write_checkpoint(self.run_dir / "checkpoints" / "step_00000003")
        for step, rows in self.rollouts.items():
            self.write(self.run_dir / "rollouts" / f"step_{step:08d}.jsonl", rows)
        for step, labels in self.evaluated.items():
            rows = [{"group_id": label, "branch": branch} for label, branch in labels]
            self.write(self.run_dir / "evaluations" / f"step_{step:08d}.jsonl", rows)
        self.write(self.run_dir / "metrics.jsonl", self.metrics)
        self.write(self.run_dir / "evaluations.jsonl", self.evaluations)
        pushes = [{"epoch": epoch, "policy_version": version} for epoch, version in self.pushes]
        self.write(self.run_dir / "pushes.jsonl", pushes)
        return judge(read_history(self.run, self.run_dir, sightings=self.sightings), has_ended=has_ended)

    def write_checkpoint(self, checkpoint: Path) -> None:
        for directory, weights in ((checkpoint / "model", self.weights), (self.run_dir / "model", self.final_weights)):
            directory.mkdir(parents=True)
            safetensors_numpy.save_file(weights, directory / "model.safetensors")
        (checkpoint / "optimizer").mkdir()
        safetensors_numpy.save_file(
            {"exp_avg/w": np.zeros(3, np.float32)}, checkpoint / "optimizer" / "shard.safetensors"
        )
        (checkpoint / "trainer_state.json").write_text(json.dumps({"extra": {"ledger": self.ledger}}))
        state = {"policy_version": self.adam_step, "adam_steps": {"w": float(self.adam_step)}}
        (checkpoint / "core_state.json").write_text(json.dumps(state))
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        sums = {
            str(path.relative_to(checkpoint)): {
                "size_bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in files
        }
        (checkpoint / "manifest.json").write_text(json.dumps({"files": sums}))
        self.damage(checkpoint)

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rollout(number: int, branch: int, spans: list[list[int]], *, staleness: bool) -> dict[str, Any]:
    times = enumerate(("admitted", "claimed", "generated", "scored", "trained"))
    return {
        "group_id": f"{number:08d}",
        "branch": branch,
        "prompt": PROMPTS[number],
        "num_tokens": 8,
        "reward": 3.0,
        "rewards": {"chaos_rewards:length": {"value": 1.0}, "chaos_rewards:slow": {"value": 2.0}},
        "staleness": int(staleness),
        "policy_versions": spans,
        "stamps": [[what, float(at_s), "replica-0"] for at_s, what in times],
    }
