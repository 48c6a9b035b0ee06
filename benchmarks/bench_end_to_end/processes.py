"""Child processes of the benchmark, and the CPU time of process trees."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 7200.0


def tree_cpu_s(pid: int) -> float:
    """Return user and system time of a process and its descendants, those that have ended included, in seconds."""
    psutil: Any = importlib.import_module("psutil")  # untyped
    seconds = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def run_child(
    module: str, task: Mapping[str, Any], directory: Path, *, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python -m module TASK RESULT``, two JSON files in ``directory``, and return the result.

    Exits the benchmark with the end of the child's log if it fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    task_file, result_file, log = (directory / name for name in ("task.json", "result.json", "child.log"))
    task_file.write_text(json.dumps(task), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY), **(variables or {})}
    command = [sys.executable, "-m", module, str(task_file), str(result_file)]
    with log.open("wb") as output:
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, timeout=_TIMEOUT_S, check=False
        )
    if ended.returncode or not result_file.is_file():
        raise SystemExit(f"{module} ended with {ended.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result
