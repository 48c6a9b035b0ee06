"""headrace as a user runs it: `headrace up` with one real generator, and a run submitted over HTTP.

The services are started anew for each run, so a run cannot profit from the one before it, and nothing of headrace runs
while TRL is measured. Cores are headrace's own placement.
"""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_end_to_end.measured import Measured, Step
from benchmarks.bench_end_to_end.processes import tree_cpu_s
from benchmarks.bench_end_to_end.works import Work
from headrace.client import ENDED, HeadraceClient
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings
from headrace.local.state_dir import StateDir

_LOOK_EVERY_S = 0.02
_ASK_EVERY_S = 2.0
_STALL_S = 600.0
_STOP_PATIENCE_S = 75.0


def run(
    work: Work, data: Path, directory: Path, *, num_steps: int, max_staleness: int, seed: int
) -> tuple[Measured, Path]:
    """Make one run; return its numbers and the directory of its final model."""
    settings = UpSettings(state_dir=directory)
    process = start_detached(
        settings, outlives_us=False, variables={"HEADRACE_REWARD_MODULES": work.reward.partition(":")[0]}
    )
    try:
        endpoint = wait_until_up(settings, process)
        key = StateDir(directory).keys().api_key
        with HeadraceClient(endpoint.api_url, key, ca_file=endpoint.ca_file) as client:
            total = work.num_warmup_steps + num_steps
            run_id = client.submit(
                run_config(work, data, total_steps=total, max_staleness=max_staleness, seed=seed)
            ).run_id
            run_dir = Path(str(client.get(run_id)["run_dir"]))
            rows, cpu_s = _follow(client, run_id, run_dir / "metrics.jsonl", process, work.num_warmup_steps, total)
            _until_finished(client, run_id)
    finally:
        _end(process)
    return measured(work, rows, cpu_s), run_dir / "model"


def run_config(work: Work, data: Path, *, total_steps: int, max_staleness: int, seed: int) -> dict[str, Any]:
    """Return the run as it is submitted."""
    return {
        **work.options,
        "name": f"bench-{work.name}",
        "model": str(data / "model"),
        "dataset_name": str(data / "train.jsonl"),
        "shuffle_dataset": False,
        "reward_funcs": [work.reward],
        "max_steps": total_steps,
        "max_staleness": max_staleness,
        "seed": seed,
    }


def measured(work: Work, rows: list[dict[str, Any]], cpu_s: float) -> Measured:
    """Return the numbers of a run from its metrics log."""
    counted = rows[work.num_warmup_steps :]
    return Measured(
        [Step(row["at_s"], row["completions/mean_length"] * work.num_rows, row["reward"]) for row in rows],
        work.num_warmup_steps,
        cpu_s,
        staleness=sum(row["staleness/mean"] for row in counted) / len(counted),
        longest=max(row["completions/max_length"] for row in counted),
    )


def _follow(
    client: HeadraceClient,
    run_id: str,
    metrics: Path,
    process: "subprocess.Popen[bytes]",
    num_warmup_steps: int,
    total: int,
) -> tuple[list[dict[str, Any]], float]:
    """Wait for the run's steps; return its metrics, and the CPU time of the measured steps."""
    rows: list[dict[str, Any]] = []
    cpu_at_s: dict[int, float] = {}
    size, asked_at, moved_at = 0, time.monotonic(), time.monotonic()
    while len(rows) < total:
        now = time.monotonic()
        if metrics.is_file() and metrics.stat().st_size != size:
            whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
            size, moved_at = metrics.stat().st_size, now
            rows += [json.loads(line) for line in whole[len(rows) :]]
            for at in (num_warmup_steps, total):
                if len(rows) >= at and at not in cpu_at_s:
                    cpu_at_s[at] = tree_cpu_s(process.pid)
        if now - asked_at > _ASK_EVERY_S:
            asked_at = now
            state = client.get(run_id)
            if state["status"] in ENDED - {"finished"} or now - moved_at > _STALL_S:
                raise SystemExit(f"the run {run_id} {state['status']}: {state.get('reason') or 'no step'}")
        time.sleep(_LOOK_EVERY_S)
    return rows, cpu_at_s[total] - cpu_at_s[num_warmup_steps]


def _until_finished(client: HeadraceClient, run_id: str) -> None:
    deadline = time.monotonic() + _STALL_S
    while client.get(run_id)["status"] not in ENDED:
        if time.monotonic() > deadline:
            raise SystemExit(f"the run {run_id} made its steps but does not end")
        time.sleep(0.2)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
