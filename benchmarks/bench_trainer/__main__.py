"""Compares our trainer with TRL's: ``python -m benchmarks.bench_trainer``.

    model, batch --> TRL's step, our step, TRL's step, our step, ...  --> medians and ratios: real tokens a second
                 --> one process for each side                        --> peak memory

Both sides have the same architecture, weights, batch and device, and use gradient checkpointing. The dtype is float32
on a CPU and bfloat16 on a GPU. TRL is measured with its fastest batch size here, with and without the old-logprob
forward pass that its correction for a vLLM engine needs; our trainer corrects in both cases. The last line is one JSON
object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_trainer.mfu import mfu
from benchmarks.bench_trainer.sides import our_core, our_rows, our_step, train_with_trl
from benchmarks.bench_trainer.workload import (
    COOKBOOK,
    HALF_BILLION,
    SMALL,
    WIDE,
    Rollout,
    Workload,
    make_rollouts,
    real_tokens,
    save_model,
)
from services.trainer.policy.policy_core import PolicyCore

TRIED_BATCH_SIZES = (4, 8, 16)


@dataclass(frozen=True)
class Pairs:
    """Seconds of steps that were made in turn."""

    theirs: list[float]
    ours: list[float]

    def ratio(self) -> float:
        """Return how many times as fast our step is, in the median pair."""
        return statistics.median(their / our for their, our in zip(self.theirs, self.ours, strict=True))


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trainer", description="Ours and TRL's trainer")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of steps (5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both sides")
    parser.add_argument(
        "--work",
        choices=["default", "cookbook"],
        default="default",
        help="what throughput is measured on; cookbook: batch and adapters of the Hugging Face cookbook's GRPO recipe",
    )
    parser.add_argument("--only", choices=["throughput", "memory"], help="leave the other half out")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {arguments.threads} threads"
    say(f"on {where}; torch {torch.__version__}")
    results: dict[str, Any] = {"device": where, "pairs": arguments.pairs}
    with tempfile.TemporaryDirectory(prefix="bench_trainer-") as scratch:
        if arguments.only != "memory":
            workload = HALF_BILLION if device.type == "cuda" else SMALL
            if arguments.work == "cookbook":
                workload = COOKBOOK
            results |= throughput(Path(scratch), device, workload, num_pairs=arguments.pairs)
        if arguments.only != "throughput":
            results |= memory(Path(scratch), device, threads=arguments.threads)
    print(json.dumps(results))


def throughput(scratch: Path, device: torch.device, workload: Workload, *, num_pairs: int) -> dict[str, Any]:
    """Measure pairs of steps, with and without TRL's old-logprob pass."""
    model = save_model(workload, scratch / "model")
    rollouts = make_rollouts(workload)
    num_tokens = real_tokens(rollouts)
    padded = len(rollouts) * sum(
        max(len(getattr(rollout, part)) for rollout in rollouts) for part in ("prompt_ids", "completion_ids")
    )
    say(
        f"throughput: {workload.num_parameters() / 1e6:.1f} million weights, vocabulary {workload.vocab_size}, "
        f"{len(rollouts)} rollouts, {num_tokens} real tokens; {padded} tokens if padded to one rectangle"
    )
    best_size = _best_batch_size(scratch, model, workload, rollouts, device)
    say(f"TRL is fastest with per_device_train_batch_size={best_size} and uses it from here on")
    rows = our_rows(rollouts, workload.num_generations, workload.vocab_size)
    by_mode: dict[str, Pairs] = {}
    for name, corrects in (("with old-logprob pass", True), ("without", False)):
        pairs = Pairs([], [])
        losses: list[float] = []
        core = our_core(model, workload, device)

        def our_turn(
            seconds: float,
            core: PolicyCore = core,
            pairs: Pairs = pairs,
            losses: list[float] = losses,
            name: str = name,
        ) -> None:
            began_at = time.perf_counter()
            losses.append(our_step(core, rows))
            pairs.theirs.append(seconds)
            pairs.ours.append(time.perf_counter() - began_at)
            say(
                f"  TRL {name}, pair {len(pairs.ours) - 1} of {num_pairs}: {seconds:.2f} s; ours {pairs.ours[-1]:.2f} s"
            )

        their_losses = _trl(scratch, model, workload, rollouts, device, num_pairs + 1, best_size, corrects, our_turn)
        if corrects:  # without the correction, TRL computes another loss
            say(f"  loss of the first step: TRL {their_losses[0]:.6f}, ours {losses[0]:.6f}")
        # The first pair warms up both sides.
        by_mode[name] = Pairs(pairs.theirs[1:], pairs.ours[1:])
    print(f"\n{'training step':34} {'TRL s':>8} {'ours s':>8} {'TRL tok/s':>10} {'ours tok/s':>10} {'ratio':>6}")
    for name, pairs in by_mode.items():
        theirs, ours = statistics.median(pairs.theirs), statistics.median(pairs.ours)
        print(
            f"{'TRL ' + name:34} {theirs:8.2f} {ours:8.2f} {num_tokens / theirs:10.0f} {num_tokens / ours:10.0f} "
            f"{pairs.ratio():6.2f}"
        )
    ours = statistics.median(pair for pairs in by_mode.values() for pair in pairs.ours)
    results: dict[str, Any] = {
        "throughput_ratio": round(by_mode["without"].ratio(), 3),
        "throughput_ratio_with_old_logprob_pass": round(by_mode["with old-logprob pass"].ratio(), 3),
        "real_tokens_per_step": num_tokens,
        "padded_tokens_per_step": padded,
        "tokens_per_s": round(num_tokens / ours, 1),
        "trl_batch_size": best_size,
    }
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        results["mfu"] = mfu(workload, tokens_per_s=num_tokens / ours, gpu=name)
        if results["mfu"] is None:
            print(f"MFU is not computed: the peak of {name} is not in benchmarks/bench_trainer/mfu.py")
        else:
            print(f"MFU of ours, without recomputation and attention: {results['mfu']:.1%}")
    return results


def _best_batch_size(
    scratch: Path, model: Path, workload: Workload, rollouts: list[Rollout], device: torch.device
) -> int:
    seconds: dict[int, float] = {}
    for batch_size in TRIED_BATCH_SIZES:
        steps: list[float] = []
        try:
            _trl(scratch, model, workload, rollouts, device, 2, batch_size, False, steps.append)
        except torch.OutOfMemoryError:
            say(f"  TRL with per_device_train_batch_size={batch_size}: out of GPU memory")
            continue
        seconds[batch_size] = steps[-1]
        say(f"  TRL with per_device_train_batch_size={batch_size}: {steps[-1]:.2f} s a step")
    return min(seconds, key=lambda size: seconds[size])


def _trl(
    scratch: Path,
    model: Path,
    workload: Workload,
    rollouts: list[Rollout],
    device: torch.device,
    num_steps: int,
    batch_size: int,
    corrects: bool,
    after_step: Any,
) -> list[float]:
    return train_with_trl(
        model,
        workload,
        rollouts,
        num_steps=num_steps,
        batch_size=batch_size,
        corrects=corrects,
        device=device,
        output=scratch / "trl",
        after_step=after_step,
    )


def memory(scratch: Path, device: torch.device, *, threads: int) -> dict[str, Any]:
    """Measure the peak memory of each side in a separate process, with 8k tokens a step and Qwen's vocabulary."""
    workload = HALF_BILLION if device.type == "cuda" else WIDE
    model = save_model(workload, scratch / "wide")
    size = workload.num_parameters() / 1e6
    say(f"memory: {size:.1f} million weights, vocabulary {workload.vocab_size}, 8,192 real tokens a step")
    longest = workload.max_prompt_length + workload.max_completion_length
    sides = {
        "TRL, its default of 8 rows a pass": ["trl", "--batch-size", "8"],
        "ours, its default of 16,384 tokens a pass": ["ours"],
        "TRL, smallest: 1 row a pass": ["trl", "--batch-size", "1"],
        f"ours, smallest: {longest} tokens a pass": ["ours", "--max-tokens", str(longest)],
    }
    found: dict[str, dict[str, int]] = {}
    print(f"\n{'peak memory, MiB':44} {'in all':>8} {'above loaded':>13}")
    for name, words in sides.items():
        command = [sys.executable, "-m", "benchmarks.bench_trainer.memory", *words, "--model", str(model)]
        environment = {"OMP_NUM_THREADS": str(threads)}
        found[name] = _measured(command, environment)
        peak, above = (found[name][key] / 2**20 for key in ("peak_bytes", "above_loaded_bytes"))
        print(f"{name:44} {peak:8.0f} {above:13.0f}", flush=True)
    theirs, ours, their_least, our_least = found.values()

    def ratio(our: dict[str, int], their: dict[str, int], key: str) -> float:
        return round(our[key] / their[key], 3)

    results = {
        "memory_ratio": ratio(ours, theirs, "peak_bytes"),
        "memory_ratio_above_loaded": ratio(ours, theirs, "above_loaded_bytes"),
        "memory_ratio_smallest_passes": ratio(our_least, their_least, "peak_bytes"),
        "memory_ratio_smallest_passes_above_loaded": ratio(our_least, their_least, "above_loaded_bytes"),
        "peak_mib": {"trl": theirs["peak_bytes"] >> 20, "ours": ours["peak_bytes"] >> 20},
    }
    print("ours / TRL: " + ", ".join(f"{name} {value}" for name, value in results.items() if "ratio" in name))
    return results


def _measured(command: list[str], environment: dict[str, str]) -> dict[str, int]:
    import os

    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    measured: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def say(what: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


if __name__ == "__main__":
    main()
