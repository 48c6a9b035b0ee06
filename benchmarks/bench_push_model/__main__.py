"""Seconds and bytes of a push of 7B, 32B and 70B models, by phase: ``python -m benchmarks.bench_push_model``.

Large models: the push's own code gathers, packs, cuts, receives and stages tensors without content, and stand-ins for
memory and wires charge for each byte at a stated bandwidth. A small model: the same code with content, in two processes
on this machine, and the model with the bandwidths that were measured here. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import os
import warnings
from typing import Any

from benchmarks.bench_push_model import here, large
from benchmarks.bench_push_model.models import LARGE

_GIB = 1 << 30


def main() -> None:
    """Compute, measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_push_model", description="A model of pushes, and a push beside its model"
    )
    parser.add_argument("--models", nargs="+", default=list(LARGE), choices=list(LARGE))
    parser.add_argument("--tensor-parallel", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--trainer-gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15, help="measured pushes on this machine (15); 0 for none")
    for field in dataclasses.fields(large.Bandwidths):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=float, default=field.default, help="GB/s; of cores, the number"
        )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = [field.name for field in dataclasses.fields(large.Bandwidths)]
    given = large.Bandwidths(**{name: getattr(arguments, name) for name in names})
    results: dict[str, Any] = {"given": dataclasses.asdict(given), "pushes": {}}
    print("given, in GB/s: " + ", ".join(f"{name} {rate:g}" for name, rate in dataclasses.asdict(given).items()))
    _print_head()
    for model in arguments.models:
        sent = large.sent_by_ranks(model)
        results["pushes"][model] = {}
        for tensor_parallel in arguments.tensor_parallel:
            push = large.large_push(sent, given, trainer_gpus=arguments.trainer_gpus, tensor_parallel=tensor_parallel)
            _print_row(model, tensor_parallel, push)
            results["pushes"][model][f"tp{tensor_parallel}"] = push.as_json()
    if arguments.rounds:
        results["here"] = _here(arguments.rounds)
    print(json.dumps(results))


def _print_head() -> None:
    print(
        f"\n{'':>9} {'GB':>6} {'gather':>7} {'pack':>6} {'send':>6} {'stage':>6} {'digest':>7} {'load':>6} "
        f"{'push s':>7} {'2 buf.':>7} {'allowed':>8} {'before: lock + push of 60':>26} {'locked GiB a replica':>22} "
        f"{'disk s':>7}"
    )


def _print_row(model: str, tensor_parallel: int, push: large.LargePush) -> None:
    before = (
        f"{push.page_lock_before_s:.0f} + {push.push_before_s:.0f} {'ends' if push.was_in_time else 'does not end'}"
    )
    locked = f"{push.locked_bytes_a_replica_before / _GIB:.0f} -> {push.locked_bytes_a_replica / _GIB:.0f}"
    print(
        f"{model:>4} TP {tensor_parallel} {push.num_bytes / 1e9:6.1f} {push.gather_s:7.2f} {push.pack_s:6.2f} "
        f"{push.send_s:6.1f} {push.stage_s:6.2f} {push.digest_s:7.2f} {push.load_s:6.2f} {push.push_s:7.1f} "
        f"{push.push_with_two_buffers_s:7.1f} {push.allowed_s:8.0f} {before:>26} {locked:>22} {push.disk_push_s:7.0f}"
    )


def _here(num_rounds: int) -> dict[str, Any]:
    found = here.measure(num_rounds=num_rounds)
    medians = {phase: found.median_s(phase) for phase in found.rounds[0].clock_s}
    shown = ", ".join(f"{phase} {1000 * one:.0f}" for phase, one in medians.items())
    print(f"\n{found.num_bytes / 1e6:.0f} MB on this machine, median ms of {num_rounds} rounds: {shown}")
    print(f"model / measured: {found.clock_ratio:.2f} by the clock, {found.cpu_ratio:.2f} in CPU seconds")
    return {
        "bytes": found.num_bytes,
        "ms": {phase: round(1000 * one, 2) for phase, one in medians.items()},
        "model_over_measured": {"clock": round(found.clock_ratio, 3), "cpu": round(found.cpu_ratio, 3)},
        "load_average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
