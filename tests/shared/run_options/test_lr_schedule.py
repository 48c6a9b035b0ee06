"""Impossible schedules are refused at submit, in sentences."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

PLAIN = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}
STAGES = {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 10, "warmup_steps": 3}


def with_kwargs(kind: str, **kwargs: object) -> dict[str, Any]:
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr_scheduler_type": "greedy"}, "greedy adapts the learning rate to a loss"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau adapts the learning rate to a loss"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5 is neither a whole number of steps nor, below 1, a share"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 0.1}, "set lr_scheduler_type: constant_with_warmup"),
        (with_kwargs("linear", num_cycles=2), "has num_cycles, but lr_scheduler_type linear takes none"),
        (with_kwargs("cosine", cycles=2), "has cycles, but lr_scheduler_type cosine takes num_cycles"),
        (with_kwargs("cosine", num_cycles=0), "num_cycles=0, which must be above 0"),
        (with_kwargs("cosine", num_cycles="2"), "num_cycles='2', which must be a number"),
        (with_kwargs("cosine", num_cycles=True), "num_cycles must be a number or a word"),
        (with_kwargs("cosine", num_cycles=float("inf")), "num_cycles must be a number or a word"),
        (with_kwargs("cosine", num_cycles=1e308), "num_cycles=1e+308, which must be above 0 and at most 1e+06"),
        (with_kwargs("cosine", num_cycles=10**400), "num_cycles must be at most 9007199254740992"),
        (with_kwargs("cosine_with_restarts", num_cycles=1.5), "which must be a whole number"),
        (with_kwargs("cosine_with_min_lr"), "set either min_lr or min_lr_rate"),
        (with_kwargs("cosine_with_min_lr", min_lr=0.0, min_lr_rate=0.1), "set either min_lr or min_lr_rate"),
        (with_kwargs("cosine_with_min_lr", min_lr_rate=1.5), "must be at least 0 and at most 1"),
        (with_kwargs("cosine_with_min_lr", min_lr=1e-5), "min_lr=1e-05, which is not below learning_rate=1e-06"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}, "lr_end=1e-07, which is not below learning_rate"),
        ({"lr_scheduler_type": "polynomial", "max_steps": 5, "warmup_steps": 5}, "leaves no step of max_steps=5"),
        (with_kwargs("warmup_stable_decay"), "{num_decay_steps: N}"),
        (with_kwargs("warmup_stable_decay", num_decay_steps=2, decay_type="steep"), "one of linear, cosine, 1-sqrt"),
        (STAGES | {"lr_scheduler_kwargs": {"num_decay_steps": 8}}, "warmup_steps=3 + num_decay_steps=8 is more than"),
        (
            STAGES | {"lr_scheduler_kwargs": {"num_stable_steps": 2, "num_decay_steps": 2}},
            "warmup_steps=3 + num_stable_steps=2 + num_decay_steps=2 is less than max_steps=10",
        ),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_with_the_reason(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_run_config(PLAIN | options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("warmup_steps", "expected"), [(0, 0), (3, 3), (3.0, 3), (0.1, 2), (0.11, 3), (0.05, 1)])
def test_a_warm_up_below_one_is_a_share_of_the_run_rounded_up(warmup_steps: float, expected: int) -> None:
    config = RunConfig.model_validate(PLAIN | {"warmup_steps": warmup_steps})
    assert config.lr_schedule().num_warmup_steps(20) == expected


def test_a_stored_run_has_the_schedule_it_was_submitted_with() -> None:
    config = RunConfig.model_validate(
        PLAIN | STAGES | {"lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.1}}
    )
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("options", "depends"),
    [
        ({}, True),
        (with_kwargs("cosine"), True),
        ({"lr_scheduler_type": "constant"}, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, True),
        (with_kwargs("warmup_stable_decay", num_decay_steps=2), True),
        (with_kwargs("warmup_stable_decay", num_decay_steps=2, num_stable_steps=5), False),
    ],
)
def test_a_schedule_knows_whether_the_length_of_the_run_changes_it(options: dict[str, Any], depends: bool) -> None:
    assert parse_run_config(PLAIN | options).lr_schedule().depends_on_length is depends
