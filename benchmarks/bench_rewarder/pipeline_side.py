"""A whole run whose reward takes two seconds, compared with the same run with an instant reward.

Runs `headrace up --simulate` with a real trainer on the demo's small model. The simulated generators set the pace, and
the staleness bound leaves room for groups that are being scored. Step times come from the metrics, after the first
steps.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.client import HeadraceClient
from headrace.demo import model, task
from headrace.local.state_dir import StateDir

NUM_REPLICAS, MAX_STALENESS = 8, 8
GROUPS_PER_STEP, NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 8, 8, 48
_REPOSITORY = Path(__file__).resolve().parents[2]
_MODULE = "benchmarks.bench_rewarder.rewards"
_PACE = {"STEP_S": "0.05", "STEP_S_PER_SEQUENCE": "0", "MAX_NUM_SEQS": "16", "COMPLETION_TOKENS": "40"}
"""Settings of a simulated replica: 2 groups at a time, about 2 s each. 8 replicas make a step of 8 groups in 1.2 s."""


class PipelineSide:
    """A directory with a model and a data set, for several runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        tokenizer = model.make_tokenizer()
        tokenizer.save_pretrained(directory / "model")
        model.make_model(tokenizer, seed=0).save_pretrained(directory / "model")
        task.write_jsonl(directory / "train.jsonl", task.make_splits(0).train)
        self._num_runs = 0

    def step_s(self, function: str, *, num_steps: int, num_warmup_steps: int) -> float:
        """Return the mean seconds of a step of a run with this reward function, with newly started services."""
        self._num_runs += 1
        state = StateDir(self._directory / f"state-{self._num_runs}")
        config: dict[str, Any] = {
            "model": str(self._directory / "model"),
            "dataset_name": str(self._directory / "train.jsonl"),
            "reward_funcs": [f"{_MODULE}:{function}"],
            "num_generations": NUM_GENERATIONS,
            "groups_per_step": GROUPS_PER_STEP,
            "max_steps": num_steps,
            "max_completion_length": MAX_COMPLETION_LENGTH,
            "max_staleness": MAX_STALENESS,
            "admission": "eager",  # generators set the pace, so the window would fill up anyway, after some steps
            "save_steps": num_steps,
            "learning_rate": 1e-5,
        }
        process = self._up(state)
        try:
            endpoint = state.endpoint()
            if endpoint is None:
                raise SystemExit("headrace up did not come up")
            with HeadraceClient(endpoint.api_url, state.keys().api_key) as client:
                run_id = client.submit(config).run_id
                for _ in client.events(run_id):
                    pass
                run = client.get(run_id)
                if run["status"] != "finished":
                    raise SystemExit(f"the run ended as {run['status']}: {run.get('reason')}")
                ended_at_s = [float(row["at_s"]) for row in client.metrics(run_id)]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        return (ended_at_s[-1] - ended_at_s[num_warmup_steps - 1]) / (len(ended_at_s) - num_warmup_steps)

    def _up(self, state: StateDir) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "headrace", "up", "--simulate", str(NUM_REPLICAS)]
        process = subprocess.Popen(
            [*command, "--state-dir", str(state.path)],
            cwd=self._directory,
            env={
                **os.environ,
                "PYTHONPATH": str(_REPOSITORY),
                "HF_HUB_OFFLINE": "1",
                **{f"HEADRACE_SIMULATED_{name}": value for name, value in _PACE.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Next:"):  # the last line of the announcement
                return process
        process.wait()
        raise SystemExit("headrace up ended before it was up")
