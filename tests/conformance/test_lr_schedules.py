"""Learning rates equal transformers' Trainer, TRL's base class, for every schedule, also after a resume."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

from services.trainer.policy.optimizers.optimizer import make_scheduler
from shared.run_options.lr_schedule import REFUSED_TYPES, LrSchedulerType
from shared.run_options.run_config import RunConfig
from tests.conformance.conftest import Models
from tests.trainer.cores import assert_same_weights, make_config, make_core, random_rows, weights

STEPS = 20
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 4},
    "linear, warm-up by share": {"lr_scheduler_type": "linear", "warmup_steps": 0.22},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "lr_scheduler_kwargs": {"num_cycles": 1.5}},
    "cosine_with_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    "polynomial": {
        "lr_scheduler_type": "polynomial",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"lr_end": 1e-5, "power": 2.0},
    },
    "constant": {"lr_scheduler_type": "constant"},
    "constant_with_warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
    "inverse_sqrt": {
        "lr_scheduler_type": "inverse_sqrt",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"timescale": 6},
    },
    "cosine_with_min_lr": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "warmup_steps": 4,
        "lr_scheduler_kwargs": {"min_lr": 2e-5},
    },
    "cosine_warmup_with_min_lr": {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "warmup_steps": 4,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    },
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 3,
        "lr_scheduler_kwargs": {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
    },
    "warmup_stable_decay, all stages told": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 0.1,
        "lr_scheduler_kwargs": {"num_stable_steps": 6, "num_decay_steps": 8, "min_lr_ratio": 0.05},
    },
}


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, *, steps: int) -> list[float]:
    """Return the learning rate of each following step."""
    rates: list[float] = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def config_of(model: Path, name: str) -> RunConfig:
    return make_config(model, learning_rate=1e-3, **SCHEDULES[name])


def test_every_schedule_of_transformers_is_offered_or_refused_with_a_reason() -> None:
    offered = set(get_args(LrSchedulerType))
    assert offered | set(REFUSED_TYPES) == {kind.value for kind in SchedulerType}
    assert {options["lr_scheduler_type"] for options in SCHEDULES.values()} == offered


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_equal_the_hugging_face_trainers(name: str, tmp_path: Path) -> None:
    theirs: Any = Trainer(
        model=torch.nn.Linear(1, 1),
        args=TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], learning_rate=1e-3, **SCHEDULES[name]
        ),
    )
    their_optimizer, our_optimizer = make_optimizer(), make_optimizer()
    their_scheduler = theirs.create_scheduler(STEPS, their_optimizer)
    expected = rates_of(their_optimizer, their_scheduler, steps=STEPS)
    scheduler = make_scheduler(our_optimizer, config_of(tmp_path, name), total_steps=STEPS)
    assert rates_of(our_optimizer, scheduler, steps=STEPS) == expected
    assert len(set(expected)) > 1 or name == "constant"


@pytest.mark.parametrize(
    ("name", "step", "rate"),
    [
        ("linear", 1, 1e-3 / 4),
        ("linear", 12, 1e-3 * 8 / 16),
        ("linear, warm-up by share", 5, 1e-3),  # 4.4 steps are 5
        ("inverse_sqrt", 8, 1e-3 * (6 / 12) ** 0.5),
        ("polynomial", 11, 1e-5 + (1e-3 - 1e-5) * 0.25),
        ("warmup_stable_decay", 11, 1e-3),
        ("warmup_stable_decay", 14, 1e-3 * (0.5 * 0.95 + 0.05)),  # a quarter of the decay, whose square root is a half
    ],
)
def test_the_learning_rate_of_a_step_is_as_worked_out_by_hand(
    name: str, step: int, rate: float, tmp_path: Path
) -> None:
    optimizer = make_optimizer()
    scheduler = make_scheduler(optimizer, config_of(tmp_path, name), total_steps=STEPS)
    assert rates_of(optimizer, scheduler, steps=STEPS)[step] == pytest.approx(rate)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_to_the_last_bit_after_a_restart(name: str, tmp_path: Path) -> None:
    """Convert the state as core_state.py does: everything except functions, as JSON."""
    config = config_of(tmp_path, name)
    straight_optimizer, before_optimizer, after_optimizer = make_optimizer(), make_optimizer(), make_optimizer()
    straight = make_scheduler(straight_optimizer, config, total_steps=STEPS)
    expected = rates_of(straight_optimizer, straight, steps=STEPS)
    before = make_scheduler(before_optimizer, config, total_steps=STEPS)
    rates_of(before_optimizer, before, steps=7)
    kept = json.loads(json.dumps({key: value for key, value in before.state_dict().items() if key != "lr_lambdas"}))
    after = make_scheduler(after_optimizer, config, total_steps=STEPS)
    after.load_state_dict({**kept, "lr_lambdas": [None]})
    after_optimizer.param_groups[0]["lr"] = kept["_last_lr"][0]
    assert rates_of(after_optimizer, after, steps=STEPS - 7) == expected[7:]


def test_a_core_with_such_a_schedule_is_resumed_to_the_last_bit(models: Models, tmp_path: Path) -> None:
    options: dict[str, Any] = {"learning_rate": 1e-3, "total_steps": STEPS, **SCHEDULES["warmup_stable_decay"]}
    straight, first, resumed = (make_core(models.start, **options) for _ in range(3))
    for core, steps in ((straight, range(16)), (first, range(13))):
        for step in steps:
            core.accumulate(random_rows(2, seed=step))
            core.step()
    (tmp_path / "state").mkdir()
    first.begin_save(tmp_path / "state", None).result(timeout=120)
    resumed.load_state(tmp_path / "state")
    for step in range(13, 16):
        resumed.accumulate(random_rows(2, seed=step))
        resumed.step()
    assert_same_weights(weights(resumed), weights(straight))
