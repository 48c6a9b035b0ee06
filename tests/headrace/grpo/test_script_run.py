"""A script's callbacks see the steps of its run while it trains, whatever events are still to be had."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo.input_delivery import SharedFiles
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.run_of_script import Files, Script, training_settings
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.training_events import TrainingEvents
from shared.run_options.grpo_config import GRPOConfig
from tests.headrace.scripted_api import Asked, event_stream, serving

pytestmark = pytest.mark.unit

_PATIENCE_POLLS = 8


def metrics(step: int) -> dict[str, Any]:
    return {"step": step, "at_s": 1e9 + step, "loss": step / 10}


class Callback:
    """Records steps and evaluations."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"evaluation at {state.global_step}")


class LongRun:
    """A run whose first events are gone when another process goes on with it, and whose event of step 5 is lost."""

    def __init__(self, callback: Callback, config: dict[str, Any]) -> None:
        self._callback, self._config = callback, config
        self._num_polls = 0
        self.seen_before_the_end: list[str] = []

    def __call__(self, asked: Asked) -> Any:
        seen = self._callback.seen
        if asked.path.endswith("/events"):
            return event_stream(("3-0", "metrics", metrics(4)), ("3-1", "metrics", metrics(6)))
        if asked.path.endswith("/metrics"):
            known = 6 if "step 4" in seen else 3
            return {"metrics": [metrics(step) for step in range(1, known + 1)], "next_cursor": None}
        if asked.path.endswith("/evaluations"):
            return {"evaluations": [{"step": 2, "eval_reward": 0.5}], "next_cursor": None}
        self._num_polls += 1
        if not self.seen_before_the_end and ("step 6" in seen or self._num_polls > _PATIENCE_POLLS):
            self.seen_before_the_end = [*seen] if "step 6" in seen else ["no step"]
        progress: dict[str, Any] = {
            "step": 6,
            "max_steps": 6,
            "groups_admitted": 4,
            "groups_trained": 4,
            "groups_dropped": {},
        }
        status = "finished" if self.seen_before_the_end else "paused"
        record = {"run_id": "run-a", "name": None, "run_dir": "/r", "config": self._config, "status": status}
        return {**record, "progress": progress}


def test_a_process_that_goes_on_with_a_long_run_has_its_log_and_tells_callbacks_of_new_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "headrace-run.json").write_text(
        json.dumps({"run_id": "run-a", "epochs_per_step": 0.1, "state_dir": None})
    )
    args = GRPOConfig(output_dir=str(tmp_path), disable_tqdm=True, eval_strategy="steps", eval_steps=2, logging_steps=1)
    callback = Callback()
    state: Any = SimpleNamespace(global_step=0, epoch=None, log_history=[])
    events = TrainingEvents(args, state=state, control=SimpleNamespace(should_training_stop=False))
    events.callbacks.append(callback)
    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    script = Script(live, ["length"], args, "org/rows", "org/rows", reward_processing_classes=[None])
    settings, _ = training_settings(
        script, Files(lambda: RunInputs(tmp_path / "inputs", SharedFiles(tmp_path / "functions")))
    )
    run = LongRun(callback, settings)
    with serving(run) as api:
        monkeypatch.setenv("HEADRACE_URL", api.url)
        monkeypatch.setenv("HEADRACE_API_KEY", "k")
        training = ScriptRun(script, events)
        training.begin(True)
        losses = training.follow_to_the_end()
        training.give_weights_to(live)
        training.client.close()
    said = capsys.readouterr().out.splitlines()
    assert f"run-a trains with the services at {api.url}; it is in /r" in said
    assert "run-a finished after 6 steps; `model` and save_model() download the model" in said
    assert run.seen_before_the_end == [
        *("step 4", "step 5", "step 6"),
    ]
    assert callback.seen == run.seen_before_the_end
    logged = [(entry["step"], "eval_reward" in entry) for entry in state.log_history]
    assert logged == [(1, False), (2, False), (2, True), (3, False), (4, False), (5, False), (6, False)]
    assert losses == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
