"""The state and the callbacks of a script see each step once, in order, with logs as transformers makes them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo.training_events import TrainingEvents, is_early_stopping
from shared.run_options.grpo_config import GRPOConfig

pytestmark = pytest.mark.unit


@dataclass
class Recorder:
    seen: list[str] = field(default_factory=list[str])
    logs: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"begin {state.max_steps}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"step {state.global_step}")
        if state.global_step == 3:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"save {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.seen.append(f"evaluate {metrics}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"epoch from {state.epoch or 0.0}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(f"epoch to {state.epoch}")


def training(*, logging_steps: int = 9, save_steps: int = 9) -> tuple[TrainingEvents, Recorder]:
    state = SimpleNamespace(
        global_step=0, max_steps=0, epoch=None, log_history=[], logging_steps=logging_steps, save_steps=save_steps
    )
    events = TrainingEvents(GRPOConfig(), state=state, control=SimpleNamespace(should_training_stop=False))
    recorder = Recorder()
    events.callbacks.append(recorder)
    events.begin(max_steps=4, epochs_per_step=0.5)
    return events, recorder


def described(**settings: Any) -> dict[str, Any]:
    config = {"model": "m", "dataset_name": "d", "reward_funcs": ["f:g"], "eval_dataset_name": "e", **settings}
    return {"config": config, "progress": {"max_steps": 6}, "run_dir": "/runs/run-a"}


def metrics(step: int, **more: float | None) -> dict[str, Any]:
    return {"step": float(step), "at_s": 1e9, "loss": step / 10, **more}


def test_steps_come_once_and_in_order() -> None:
    events, recorder = training(logging_steps=2, save_steps=4)
    for step in (1, 2, 2, 1, 3, 4):  # after a crash, steps are made again
        events.take(metrics(step))
    first = ["begin 4", "epoch from 0.0", "step 1", "step 2", "epoch to 1.0"]
    assert recorder.seen == [*first, "epoch from 1.0", "step 3", "step 4", "save 4", "epoch to 2.0"]
    assert events.control.should_training_stop


def test_the_last_step_is_saved_and_each_save_is_told_once_its_checkpoint_is_there() -> None:
    events, recorder = training(save_steps=2)
    events.until_saved = lambda step: recorder.seen.append(f"checkpoint {step}")
    for step in (1, 2, 3):
        events.take(metrics(step))
    assert events.control.should_training_stop
    events.control.should_training_stop = False
    events.take(metrics(4))
    steps = [seen for seen in recorder.seen if not seen.startswith("epoch")]
    assert steps[2:] == ["step 2", "checkpoint 2", "save 2", "step 3", "step 4", "checkpoint 4", "save 4"]


def test_a_run_that_is_to_stop_does_not_train_on_until_a_checkpoint_is_there() -> None:
    events, recorder = training(save_steps=3)
    events.until_saved = lambda step: recorder.seen.append(f"checkpoint {step}")
    for step in (1, 2, 3):
        events.take(metrics(step))
    assert recorder.seen[-2:] == ["step 3", "save 3"]


def test_the_save_of_the_last_step_comes_after_its_evaluation() -> None:
    events, recorder = training()
    events.describe(described(eval_steps=4), epochs_per_step=0.1)
    for step in (5, 6):
        events.take(metrics(step))
    assert recorder.seen[-1] == "step 6"
    events.take_evaluation_once({"step": 6, "eval_reward": 0.5})
    assert recorder.seen[-3:-1] == ["evaluate {'eval_reward': 0.5}", "save 6"]


def test_the_metrics_of_the_newest_step_are_not_means() -> None:
    events, _ = training(logging_steps=2)
    for step in (1, 2, 3):
        events.take({"step": step, "entropy_coef": 0.1 * step})
    assert events.newest["entropy_coef"] == pytest.approx(0.3)


def test_a_step_is_logged_then_evaluated_then_saved_as_in_transformers() -> None:
    events, recorder = training(logging_steps=2)
    events.describe(described(eval_steps=2, save_steps=2), epochs_per_step=0.5)
    for step in (1, 2, 3):
        events.take(metrics(step))
        if step == 2:
            events.take_evaluation_once({"step": 2, "eval_reward": 0.5})
    first = ["evaluate {'eval_reward': 0.5}", "save 2", "epoch to 1.0"]
    assert recorder.seen[-5:] == [*first, "epoch from 1.0", "step 3"]


def test_a_save_waits_for_no_evaluation_that_is_still_under_way() -> None:
    events, recorder = training()
    events.describe(described(eval_steps=2, save_steps=2), epochs_per_step=0.1)
    for step in (1, 2, 3, 4):
        events.take(metrics(step))
    events.take_evaluation_once({"step": 2, "eval_reward": 0.5})
    late = ["step 2", "save 2", "epoch to 1.0", "epoch from 1.0", "step 3", "step 4", "evaluate {'eval_reward': 0.5}"]
    assert recorder.seen[-7:] == late
    events.end({})
    assert recorder.seen[-2:] == ["save 4", "epoch to 2.0"]


def test_a_late_evaluation_has_the_epoch_of_the_step_that_was_evaluated() -> None:
    events, recorder = training(logging_steps=99)
    for step in (1, 2, 3, 4):
        events.take(metrics(step))
    events.take_evaluation_once({"step": 2, "eval_reward": 0.5})
    assert events.state.log_history == [{"eval_reward": 0.5, "epoch": 1.0, "step": 2}]
    assert recorder.logs == [{"eval_reward": 0.5, "epoch": 1.0}]
    assert events.state.epoch == 2.0


def test_the_last_epoch_ends_with_the_training_if_it_is_not_whole() -> None:
    events, recorder = training()
    for step in (1, 2, 3):
        events.take(metrics(step))
    events.end({})
    begin = ["begin 4", "epoch from 0.0", "step 1", "step 2", "epoch to 1.0"]
    assert recorder.seen == [*begin, "epoch from 1.0", "step 3", "epoch to 1.5"]


def test_an_epoch_ends_with_its_last_step_whatever_the_rounding() -> None:
    events, recorder = training(logging_steps=99, save_steps=99)
    assert 49 * (1 / 49) < 1
    events.begin(max_steps=98, epochs_per_step=1 / 49)
    for step in range(1, 50):
        events.take(metrics(step))
    assert recorder.seen[-2:] == ["step 49", "epoch to 1.0"]


@pytest.mark.parametrize(
    ("settings", "epochs"), [({"num_train_epochs": 2.0}, 2), ({"max_steps": 6}, 3), ({"num_train_epochs": 0.5}, 1)]
)
def test_the_epochs_of_the_run_are_whole(settings: dict[str, Any], epochs: int) -> None:
    """Six steps of two fifths of the rows are 2.4 passes: the last step may begin another pass."""
    events, _ = training()
    events.describe(described(eval_steps=2, **settings), epochs_per_step=0.4)
    assert events.state.num_train_epochs == epochs


def test_a_log_has_the_means_over_its_steps() -> None:
    events, recorder = training(logging_steps=3)
    events.take(metrics(1, reward=1.0, kl=None))
    events.take(metrics(2))
    events.take(metrics(3, reward=4.0))
    events.take(metrics(4, reward=0.0))
    events.end({"train_loss": 0.25})
    last = {"loss": 0.4, "reward": 0.0, "train_loss": 0.25, "epoch": 2.0}
    assert recorder.logs == [{"loss": pytest.approx(0.2), "reward": 2.5, "epoch": 1.5}, last]
    assert [(entry["step"], entry["epoch"]) for entry in events.state.log_history] == [(3, 1.5), (4, 2.0)]


def test_a_log_has_the_newest_value_of_totals_and_of_what_transformers_logs_so() -> None:
    events, recorder = training(logging_steps=3)
    for step, rate in ((1, 0.3), (2, 0.2), (3, 0.1)):
        events.take(metrics(step, num_tokens=10.0 * step, learning_rate=rate, grad_norm=rate))
    newest = {"num_tokens": 30.0, "learning_rate": 0.1, "grad_norm": 0.1}
    assert recorder.logs == [{"loss": pytest.approx(0.2), **newest, "epoch": 1.5}]


def test_logs_and_saves_come_at_the_steps_that_the_state_shows() -> None:
    state = SimpleNamespace(global_step=0, max_steps=0, epoch=None, log_history=[])
    events = TrainingEvents(
        GRPOConfig(logging_steps=0.5), state=state, control=SimpleNamespace(should_training_stop=False)
    )
    recorder = Recorder()
    events.callbacks.append(recorder)
    events.describe(described(save_steps=0.3, eval_steps=5), epochs_per_step=0.1)
    for step in (1, 2, 3, 4):
        events.take(metrics(step))
    assert (state.logging_steps, state.save_steps) == (3, 2)
    assert [entry["step"] for entry in state.log_history] == [3]
    assert [seen for seen in recorder.seen if seen.startswith("save")] == ["save 2", "save 4"]


@pytest.mark.parametrize("continues", [True, False])
def test_a_new_training_has_nothing_of_one_that_failed(continues: bool) -> None:
    events, recorder = training(logging_steps=2)
    events.log({"mine": 1.0})
    events.take(metrics(1))
    events.begin_anew(continues=continues)
    events.begin(max_steps=4, epochs_per_step=0.5)
    for step in (1, 2):
        events.take(metrics(step, reward=0.5))
    assert recorder.logs[1:] == [{"loss": pytest.approx(0.15), "reward": 0.5, "epoch": 1.0}]
    assert len(events.state.log_history) == (2 if continues else 1)


def test_an_evaluation_and_the_end_are_in_the_log() -> None:
    events, recorder = training()
    events.take_evaluation({"step": 0, "eval_reward": 0.5}, step=0)
    events.end({"train_loss": 0.1})
    assert recorder.seen[-1] == "evaluate {'eval_reward': 0.5}"
    assert events.state.log_history == [
        {"eval_reward": 0.5, "epoch": 0.0, "step": 0},
        {"train_loss": 0.1, "epoch": 0.0, "step": 0},
    ]


def test_a_callback_may_lack_events_and_may_return_another_control() -> None:
    events, _ = training(logging_steps=1, save_steps=1)
    other = SimpleNamespace(should_training_stop=True)

    class Answers:
        def on_step_end(self, *_: Any, **__: Any) -> SimpleNamespace:
            return other

    events.callbacks[:] = [object(), Answers()]
    events.take(metrics(1))
    assert events.control is other


def test_the_state_has_the_best_evaluation_after_the_callbacks_have_seen_it() -> None:
    events, _ = training()
    seen: list[float | None] = []

    class Looks:
        def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            seen.append(getattr(state, "best_metric", None))

    events.callbacks[:] = [Looks()]
    events.describe(described(eval_steps=2, metric_for_best_model="reward"), epochs_per_step=0.5)
    for step, reward in ((2, 0.5), (4, 0.75), (6, 0.75)):
        events.take_evaluation_once({"step": step, "eval_reward": reward})
    events.take_evaluation({"eval_reward": 0.9}, step=6)  # trainer.evaluate(other_rows)
    assert seen == [None, 0.5, 0.75, 0.75]
    state = events.state
    assert (state.best_metric, state.best_global_step) == (0.75, 4)
    assert state.best_model_checkpoint == "/runs/run-a/checkpoints/step_00000004"
    events.take_best({"step": 2, "metric": "eval_reward", "value": 0.875})  # the record of the run decides
    assert (state.best_metric, state.best_global_step) == (0.875, 2)


def test_the_callback_for_early_stopping_is_left_to_the_run() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    early = type("EarlyStoppingCallback", (), {"on_train_begin": fail, "__module__": "transformers.trainer_callback"})()
    own = type("EarlyStoppingCallback", (), {"__module__": "my_script"})()
    events, _ = training()
    events.callbacks[:] = [early]
    events.fire("on_train_begin")
    assert (is_early_stopping(early), is_early_stopping(own)) == (True, False)


def test_a_callback_is_removed_by_itself_or_by_its_class() -> None:
    events, recorder = training()
    second = Recorder(seen=["second"])
    events.callbacks.append(second)
    assert events.remove(second) is second
    assert events.remove(Recorder) is recorder
    assert events.remove(Recorder) is None
    assert events.callbacks == []
