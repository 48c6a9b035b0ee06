"""A script's callbacks see the steps of its run while it trains, whatever events are still to be had."""

import contextlib
import json
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo import script_run
from headrace.grpo.grpo_trainer import GRPOTrainer
from headrace.grpo.input_delivery import SharedFiles
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.run_of_script import training_settings
from headrace.grpo.script import Files, Script
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.training_events import TrainingEvents
from shared.errors import HeadraceError
from shared.run_options.grpo_config import GRPOConfig
from tests.headrace.scripted_api import HANG_UP, Answer, Asked, ScriptedApi, event_stream, serving

pytestmark = pytest.mark.unit

_PATIENCE_POLLS = 300


def metrics(step: int) -> dict[str, Any]:
    return {"step": step, "at_s": 1e9 + step, "loss": step / 10}


@contextlib.contextmanager
def elsewhere(run: Callable[[Asked], Any], monkeypatch: pytest.MonkeyPatch) -> Generator[ScriptedApi]:
    """Serve a run as a deployment that the environment of a script names."""
    with serving(run) as api:
        monkeypatch.setenv("HEADRACE_URL", api.url)
        monkeypatch.setenv("HEADRACE_API_KEY", "k")
        yield api


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

    def __init__(self, callback: Callback, config: dict[str, Any], *, max_steps: int) -> None:
        self._callback, self._config, self._max_steps = callback, config, max_steps
        self._num_polls = 0
        self.seen_before_the_end: list[str] = []

    def __call__(self, asked: Asked) -> Any:
        seen = self._callback.seen
        if "dry_run" in asked.path:
            return {"run": None, "warnings": [], "derived": {"steps": 6}}
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
            "max_steps": self._max_steps,
            "groups_admitted": 4,
            "groups_trained": 4,
            "groups_dropped": {},
        }
        status = "finished" if self.seen_before_the_end else "paused"
        record = {"run_id": "run-a", "name": None, "run_dir": "/r", "config": self._config, "status": status}
        return {**record, "progress": progress}


@pytest.mark.parametrize("max_steps", [6, 0], ids=["it has begun", "it has waited in the queue"])
def test_a_process_that_goes_on_with_a_long_run_has_its_log_and_tells_callbacks_of_new_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_steps: int
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
    run = LongRun(callback, settings, max_steps=max_steps)
    with elsewhere(run, monkeypatch) as api:
        training = ScriptRun(lambda: script, events)
        training.begin(True)
        losses = training.follow_to_the_end()
        training.give_weights()
        training.client.close()
    said = capsys.readouterr().out.splitlines()
    assert f"run-a trains with the services at {api.url}; it is in /r" in said
    assert "run-a finished after 6 steps; `model` and save_model() download the model" in said
    assert state.max_steps == 6
    assert run.seen_before_the_end == [
        *("step 4", "step 5", "step 6"),
    ]
    assert callback.seen == run.seen_before_the_end
    logged = [(entry["step"], "eval_reward" in entry) for entry in state.log_history]
    assert logged == [(1, False), (2, False), (2, True), (3, False), (4, False), (5, False), (6, False)]
    assert losses == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


class NewRun:
    """A run that is submitted, and pauses when it is asked to. Its data have no end."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"run_id": "run-a", "name": None, "run_dir": "/r", "status": "running"}
        self.record |= {"desired": "run", "progress": {"step": 0, "max_steps": 8}}

    def __call__(self, asked: Asked) -> Any:
        if asked.path.startswith("/v1/runs?dry_run"):
            return {"valid": True, "warnings": [], "derived": {"steps": 16}}
        if asked.path == "/v1/runs":
            self.record["config"] = asked.body
            derived = {"steps": 8, "prompt_groups": 16, "epoch_prompts": None}
            summary = {name: value for name, value in self.record.items() if name != "config"}
            return {"valid": True, "warnings": ["it may surprise"], "derived": derived, "run": summary}
        if asked.path.endswith("/pause"):
            self.record["status"] = "paused"
        return self.record


def test_what_a_script_assigns_to_its_trainer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True, eval_strategy="steps", eval_steps=2)
    script = GRPOTrainer("org/model", "length", args, "org/rows", callbacks=[Interrupted()])
    script.train_dataset, script.eval_dataset = "org/more", "org/held-out"
    script.reward_funcs = ["accuracy_reward", "length"]
    with elsewhere(NewRun(), monkeypatch) as api:
        with pytest.raises(KeyboardInterrupt):
            script.train()
        script.client.close()
    config = api.asked[0].body
    assert (config["dataset_name"], config["eval_dataset_name"]) == ("org/more", "org/held-out")
    assert config["reward_funcs"] == ["accuracy_reward", "length"]
    script.reward_processing_classes = [object()]
    with pytest.raises(ValueError, match=r"number of reward processing classes \(1\) must match .* functions \(2\)"):
        script.train()


class Interrupted:
    """Ctrl-C is pressed when the training begins."""

    def __init__(self) -> None:
        self.num_train_epochs = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_train_epochs = state.num_train_epochs
        raise KeyboardInterrupt


def test_a_run_that_continues_one_of_the_process_has_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True, beta=0.1)
    script, run = GRPOTrainer("org/model", "length", args, "org/rows", callbacks=[Interrupted()]), NewRun()
    with elsewhere(run, monkeypatch) as api:
        with pytest.raises(KeyboardInterrupt):
            script.train()
        run.record["config"]["model"] = "/runs/run-0/model"  # it began with the weights of another training
        run.record |= {"status": "stopped", "progress": {"step": 4, "max_steps": 8}}
        args.max_steps = 16
        with pytest.raises(KeyboardInterrupt):
            script.train(resume_from_checkpoint=True)
        script.client.close()
    submitted = [asked.body for asked in api.asked if asked.path == "/v1/runs"][-1]
    assert (submitted["resume_from_checkpoint"], submitted["model"]) == ("run-a", "/runs/run-0/model")


class AtTheBeginning:
    """Calls something when the training begins."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = dict

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call()


def test_an_evaluation_while_the_training_runs_or_is_paused_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    args, callback = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True), AtTheBeginning()
    script = GRPOTrainer("org/model", "length", args, "org/rows", "org/rows", callbacks=[callback])
    callback.call = script.evaluate
    with elsewhere(NewRun(), monkeypatch):
        with pytest.raises(ValueError, match=r"the training still runs, .* eval_strategy to evaluate while it trains"):
            script.train()
        with pytest.raises(ValueError, match=r"the training is paused, .*: train\(\) goes on with it"):
            script.evaluate()
        script.client.close()


class Evaluated(NewRun):
    """A run that evaluates, while a reward function fails for a share of the completions."""

    def __init__(self, failed_ratio: float, *, num_lost: int = 0) -> None:
        super().__init__()
        self._metrics = {"step": 0, "eval_reward": None, "eval_rewards/length/failed_ratio": failed_ratio}
        self._metrics |= {"eval_groups/done": 1.0, "eval_rewards/other/failed_ratio": None}
        self._metrics |= {"eval_rollouts/lost": float(num_lost)}

    def __call__(self, asked: Asked) -> Any:
        answer = super().__call__(asked)
        if asked.path == "/v1/runs":
            self.record["config"] |= {"reward_failure_threshold": 0.5, "groups_per_step": 1, "num_generations": 4}
            counts: dict[str, Any] = {"groups_admitted": 0, "groups_trained": 0, "groups_dropped": {}}
            self.record |= {"status": "finished", "progress": {"step": 0, "max_steps": 0, **counts}}
        if asked.path.endswith("/events"):
            return event_stream()
        if asked.path.endswith("/metrics"):
            return {"metrics": [], "next_cursor": None}
        if asked.path.endswith("/evaluations"):
            return {"evaluations": [self._metrics], "next_cursor": None}
        return answer


def test_an_evaluation_in_which_a_reward_function_fails_too_often_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_INPUTS_DIR", str(tmp_path))
    args = GRPOConfig(disable_tqdm=True)
    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    script = Script(live, ["length"], args, "org/rows", "org/rows", reward_processing_classes=[None])
    for run, says in (
        (Evaluated(0.5, num_lost=2), None),
        (Evaluated(1.0), r"the reward function length failed for 100% of the completions of run-a, .* rewarder's log"),
        (Evaluated(0.75, num_lost=3), r"75% of the rollouts of run-a, .* were lost; the log of the sessions service"),
    ):
        with elsewhere(run, monkeypatch):
            evaluating = ScriptRun(lambda: script, TrainingEvents(args, state=None, control=None))
            with contextlib.nullcontext() if says is None else pytest.raises(HeadraceError, match=says):
                assert evaluating.evaluate("org/rows")["eval_groups/done"] == 1
            evaluating.client.close()
        assert "note: it may surprise" in capsys.readouterr().out


def test_a_model_that_is_saved_while_the_training_runs_is_not_the_one_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    args, callback = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True), AtTheBeginning()
    script = GRPOTrainer("org/model", "length", args, "org/rows", callbacks=[callback])
    callback.call, run = script.save_model, NewRun()
    run.record["progress"]["step"] = 3
    with elsewhere(run, monkeypatch):
        with pytest.raises(HeadraceError, match=r"the weights of run-a are on the services' machine, .* has ended$"):
            script.train()
        script.client.close()
    assert [path.name for path in tmp_path.iterdir()] == ["headrace-run.json"]


@pytest.mark.parametrize("said", ["note: it may surprise", "run-a trains with", "nothing"])
def test_ctrl_c_while_a_run_begins_pauses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    pytest.importorskip("transformers")

    def say(text: str) -> None:
        print(text)  # noqa: T201
        if text.startswith(said):
            raise KeyboardInterrupt

    monkeypatch.setattr(script_run, "say", say)
    args, callback = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True), Interrupted()
    script = GRPOTrainer("org/model", "length", args, "org/rows", callbacks=[callback])
    with elsewhere(NewRun(), monkeypatch) as api:
        with pytest.raises(KeyboardInterrupt):
            script.train()
        script.client.close()
    assert script.run is not None
    assert script.run["run_id"] == "run-a"
    assert [asked.path for asked in api.asked if asked.method == "POST"] == ["/v1/runs", "/v1/runs/run-a/pause"]
    assert json.loads((tmp_path / "headrace-run.json").read_text())["run_id"] == "run-a"
    assert "run-a pauses after its batch; train() goes on with it." in capsys.readouterr().out
    if said == "nothing":
        assert callback.num_train_epochs == 1, "a stream without an end is one epoch, as in transformers"


class StopsAtOnce:
    """Stops the training after its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


class AwayAtStop(NewRun):
    """A run that makes one step, and whose API does not answer the first request to stop it."""

    def __init__(self) -> None:
        super().__init__()
        self._events = [("1-0", "metrics", metrics(1))]
        self.num_stops = 0

    def __call__(self, asked: Asked) -> Any:
        if asked.path.endswith("/events"):
            events, self._events = self._events, []
            return event_stream(*events)
        if asked.path.endswith(("/metrics", "/evaluations")):
            return {asked.path.rpartition("/")[2]: [], "next_cursor": None}
        if asked.path.endswith("/stop"):
            self.num_stops += 1
            if self.num_stops == 1:
                return HANG_UP
            self.record["status"] = "stopped"
        return super().__call__(asked)


def test_a_callback_stops_the_run_though_the_run_api_is_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True)
    state: Any = SimpleNamespace(global_step=0, epoch=None, log_history=[])
    events = TrainingEvents(args, state=state, control=SimpleNamespace(should_training_stop=False))
    events.callbacks.append(StopsAtOnce())
    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    script, run = Script(live, ["length"], args, "org/rows", None, reward_processing_classes=[None]), AwayAtStop()
    with elsewhere(run, monkeypatch):
        training = ScriptRun(lambda: script, events)
        training.begin(None)
        training.follow_to_the_end()
        training.client.close()
    assert training.run is not None
    assert (training.run["status"], run.num_stops) == ("stopped", 2)


class EndingRun(NewRun):
    """A run that has made its steps, and refuses a pause."""

    def __call__(self, asked: Asked) -> Any:
        if asked.path.endswith("/pause"):
            return Answer(409, json.dumps({"type": "/problems/run-is-ending", "detail": "No steps."}).encode())
        return super().__call__(asked)


def test_ctrl_c_during_the_last_evaluation_says_that_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path), max_steps=8, disable_tqdm=True)
    script = GRPOTrainer("org/model", "length", args, "org/rows", callbacks=[Interrupted()])
    with elsewhere(EndingRun(), monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            script.train()
        script.client.close()
    assert "run-a has made its steps, and ends by itself after its last evaluation" in capsys.readouterr().out
