"""Peak memory of one side, in a separate process: ``python -m benchmarks.bench_trainer.memory SIDE ...``.

Makes one optimizer step with Adam's moments already allocated, as in every step except a run's first. Prints one JSON
object. On a CPU, memory is the process's resident set as counted by the kernel (VmHWM). On a GPU, it is what torch
allocated.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_trainer.sides import our_core, our_rows, our_step, train_with_trl
from benchmarks.bench_trainer.workload import HALF_BILLION, WIDE, make_rollouts, trimmed

NUM_TOKENS = 8192


def main() -> None:
    """Measure one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["ours", "trl"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="our max_tokens_per_microbatch")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = HALF_BILLION if device.type == "cuda" else WIDE
    rollouts = trimmed(make_rollouts(workload), num_tokens=NUM_TOKENS)
    loaded: list[int] = []
    if arguments.side == "ours":
        core = our_core(arguments.model, workload, device, max_tokens=arguments.max_tokens)
        loaded.append(_now_bytes(device))
        rows = our_rows(rollouts, workload.num_generations, workload.vocab_size)
        our_step(core, rows[:1])  # allocates the moments
        our_step(core, rows)
    else:
        with tempfile.TemporaryDirectory() as output:
            train_with_trl(
                arguments.model,
                workload,
                rollouts,
                num_steps=1,
                batch_size=arguments.batch_size,
                corrects=True,
                device=device,
                output=Path(output),
                after_step=lambda _: None,
                before_training=lambda: loaded.append(_now_bytes(device)),
                begins_with_moments=True,
            )
    peak = _peak_bytes(device)
    print(json.dumps({"peak_bytes": peak, "above_loaded_bytes": peak - loaded[0]}))


def _now_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(name: str) -> int:
    lines: Any = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
