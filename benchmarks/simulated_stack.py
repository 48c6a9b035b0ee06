"""`headrace up --simulate` in a directory of its own, with real trainer, rewarder and Redis, for benchmarks of runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from headrace.client import HeadraceClient
from headrace.demo import model, task
from headrace.demo.settings import RUN_OPTIONS
from headrace.local.state_dir import StateDir

_READY_S = 300.0


def demo_like_run(directory: Path) -> dict[str, Any]:
    """Return a run of the demo's model, which is written to ``directory``. Its reward judges random tokens too."""
    tokenizer = model.make_tokenizer()
    model.make_model(tokenizer, seed=0).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")  # pyright: ignore[reportUnknownMemberType]
    task.write_jsonl(directory / "train.jsonl", task.make_splits(0).train)
    return {
        **RUN_OPTIONS,
        "model": str(directory / "model"),
        "dataset_name": str(directory / "train.jsonl"),
        "reward_funcs": ["repetition_penalty_reward"],
    }


@contextlib.contextmanager
def simulated_stack(
    directory: Path, *, state: StateDir, simulation: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> Generator[tuple[HeadraceClient, int]]:
    """Start the services with one simulated replica, and stop them afterwards.

    Args:
        directory: Where the output goes.
        state: State directory of the deployment.
        simulation: HEADRACE_SIMULATED_* without the prefix.
        environment: Further variables of the services.

    Yields:
        A client, and the pid of the launcher.
    """
    command = [sys.executable, "-m", "headrace", "up", "--simulate", "1", "--state-dir", str(state.path)]
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        **{f"HEADRACE_SIMULATED_{name}": value for name, value in simulation.items()},
        **(environment or {}),
    }
    with (
        (directory / "up.log").open("wb") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=log) as up,
    ):
        try:
            deadline = time.monotonic() + _READY_S
            while b"Next:" not in (directory / "up.log").read_bytes():
                if up.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"headrace did not come up: {(directory / 'up.log').read_text()}")
                time.sleep(0.1)
            endpoint = state.endpoint()
            assert endpoint is not None
            with HeadraceClient(endpoint.api_url, state.keys().api_key, timeout_s=60) as client:
                yield client, up.pid
        finally:
            up.send_signal(signal.SIGINT)
