"""Reward functions see the progress of training under transformers' names."""

import dataclasses
from typing import Any

import msgspec
import pytest

from services.rewarder.trainer_state import TrainerState
from shared.redis.run_record import BestEvaluation, Progress
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def a_run(**settings: Any) -> RunConfig:
    return RunConfig(model="m", dataset_name="d", reward_funcs=["accuracy_reward"], groups_per_step=4, **settings)


def test_it_has_the_progress_the_intervals_and_the_best_checkpoint() -> None:
    config = a_run(
        max_steps=40, num_generations=8, save_steps=0.5, logging_steps=0.1, eval_dataset_name="e", eval_steps=5,
        load_best_model_at_end=True,
    )  # fmt: skip
    progress = Progress(
        step=10, max_steps=40, epoch=0.5, num_tokens=12_345, best=BestEvaluation(5, "eval_reward", 0.75)
    )
    state = TrainerState.of(config, progress, run_dir="/runs/run-a")
    assert msgspec.structs.asdict(state) == msgspec.structs.asdict(TrainerState()) | {
        "global_step": 10,
        "max_steps": 40,
        "epoch": 0.5,
        "num_train_epochs": 2,  # 40 steps are four times as many as the half epoch so far
        "logging_steps": 4,
        "eval_steps": 5,
        "save_steps": 20,
        "train_batch_size": 32,
        "num_input_tokens_seen": 12_345,
        "best_metric": 0.75,
        "best_global_step": 5,
        "best_model_checkpoint": "/runs/run-a/checkpoints/step_00000005",
    }


def test_before_the_first_step_there_is_no_epoch_and_no_best() -> None:
    state = TrainerState.of(a_run(), Progress(max_steps=3), run_dir="/runs/run-a")
    assert (state.global_step, state.epoch, state.eval_steps) == (0, 0.0, 0)
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (None, None, None)
    assert state.is_world_process_zero


def test_a_run_that_continues_another_one_counts_its_steps_too() -> None:
    progress = Progress(step=10, max_steps=40, epoch=4.5, best=BestEvaluation(5, "eval_reward", 0.75))
    config = a_run(max_steps=120, save_steps=0.5)
    state = TrainerState.of(config, progress, run_dir="/runs/run-b", steps_before=80)
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (90, 120, 4.5, 6)
    assert (state.best_global_step, state.best_model_checkpoint) == (85, "/runs/run-b/checkpoints/step_00000005")
    assert state.save_steps == 20, "the run saves at half of its own steps"
    starting = TrainerState.of(config, Progress(), run_dir="/runs/run-b", steps_before=80)
    assert (starting.global_step, starting.max_steps) == (80, 0), "its training rank does not know yet"


def epochs(progress: Progress, **settings: Any) -> int:
    return TrainerState.of(a_run(**settings), progress, run_dir="/runs/run-a").num_train_epochs


def test_the_epochs_of_a_run_are_those_of_its_settings_at_every_step() -> None:
    # 10 rows in steps of 4: three epochs are 7.5 steps, so the run makes 8, of 3.2 epochs.
    steps = [Progress(step=step, max_steps=8, epoch=0.4 * step) for step in range(9)]
    assert {epochs(progress, num_train_epochs=3.0) for progress in steps} == {3}
    assert epochs(Progress(max_steps=3), num_train_epochs=0.5) == epochs(Progress(max_steps=3), max_steps=3) == 1


def test_the_epochs_of_a_run_in_steps_are_rounded_up_whatever_the_rounding_of_numbers() -> None:
    # 49 rows in steps of one: 98 steps are two epochs.
    steps = [Progress(step=step, max_steps=98, epoch=step / 49) for step in range(1, 99)]
    assert max(progress.epoch * 98 / progress.step for progress in steps) > 2
    assert {epochs(progress, max_steps=98) for progress in steps} == {2}
    assert epochs(Progress(step=1, max_steps=99, epoch=1 / 49), max_steps=99) == 3


def test_an_endpoint_gets_the_steps_and_what_is_known() -> None:
    assert TrainerState().known() == {"global_step": 0, "max_steps": 0}
    assert TrainerState(3, 9, best_metric=0.5).known() == {"global_step": 3, "max_steps": 9, "best_metric": 0.5}


def test_it_has_every_field_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {field.name for field in dataclasses.fields(transformers.TrainerState)}
    assert {field.name for field in msgspec.structs.fields(TrainerState)} == theirs
