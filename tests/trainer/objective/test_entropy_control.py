"""Which tokens entropy selects for the loss, and how the coefficient of its bonus adapts."""

import json
import math
from typing import Any

import pytest
import torch

from services.trainer.objective import entropy_control
from services.trainer.objective.entropy_control import EntropyControl, high_entropy_threshold
from services.trainer.objective.token_stats import TokenStats
from shared.errors import HeadraceError
from shared.run_options.run_config import RunConfig


def control(**options: Any) -> EntropyControl:
    plain: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}
    return EntropyControl(RunConfig.model_validate(plain | options))


def adaptive(**options: Any) -> EntropyControl:
    plain = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.04, "entropy_coef_max": 0.15}
    return control(**(plain | {"entropy_coef_min": 0.05, "entropy_target": 1.0} | options))


def step(entropy: float) -> TokenStats:
    return TokenStats(num_tokens=10.0, num_bonus_tokens=4.0, bonus_entropy_sum=4 * entropy)


@pytest.mark.parametrize(
    ("share", "threshold"),
    [(1.0, 1.0), (0.5, 3.0), (0.25, 4.0), (0.0, 5.0), (0.2, 4.2)],  # 0.2 is interpolated between 4 and 5
)
def test_the_threshold_is_a_quantile_from_above(share: float, threshold: float) -> None:
    entropies = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert high_entropy_threshold(entropies, top_entropy_quantile=share) == pytest.approx(threshold)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.37, 1.0])
def test_more_tokens_than_torch_can_take_have_the_same_threshold(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    entropies = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    expected = torch.quantile(entropies, 1 - share).item()
    monkeypatch.setattr(entropy_control, "_QUANTILE_LIMIT", 1000)
    assert high_entropy_threshold(entropies, top_entropy_quantile=share) == pytest.approx(expected, abs=1e-6)


def test_without_tokens_nothing_is_kept() -> None:
    assert high_entropy_threshold(torch.empty(0), top_entropy_quantile=0.2) == math.inf


def test_a_constant_coefficient_stays_and_is_reported() -> None:
    constant = control(entropy_coef=0.1)
    constant.update(step(9.0))
    assert constant.applied_coef == 0.1
    assert constant.metrics() == {"entropy_coef": 0.1}
    assert control().metrics() == {}


def test_an_adaptive_coefficient_rises_at_or_below_the_target_and_falls_above_within_its_bounds() -> None:
    adapting = adaptive()
    seen: list[float] = []
    for entropy in (1.0, 0.5, 1.1, 2.0, 2.0):
        adapting.update(step(entropy))
        seen.append(adapting.metrics()["entropy_coef"])
    assert seen == pytest.approx([0.14, 0.15, 0.11, 0.07, 0.05])


def test_an_adaptive_coefficient_applies_only_once_entropy_was_seen_at_or_below_the_target() -> None:
    adapting = adaptive()
    assert adapting.applied_coef == 0.0
    adapting.update(step(1.0))
    assert adapting.applied_coef == pytest.approx(0.14)
    adapting.update(step(1.1))
    assert adapting.applied_coef == 0.0


def test_a_step_without_tokens_changes_nothing() -> None:
    adapting = adaptive()
    adapting.update(TokenStats())
    assert adapting.metrics() == {"entropy_coef": 0.1}


@pytest.mark.parametrize("entropies", [[], [0.5], [0.5, 2.0]])
def test_a_control_that_was_saved_goes_on_where_it_was(entropies: list[float]) -> None:
    first, second = adaptive(), adaptive()
    for entropy in entropies:
        first.update(step(entropy))
    second.load_json(json.loads(json.dumps(first.to_json())))
    assert second.applied_coef == first.applied_coef
    assert second.to_json() == first.to_json()


def test_a_run_that_did_not_adapt_leaves_the_coefficient_of_its_fork_alone() -> None:
    fork = adaptive()
    fork.load_json(control(entropy_coef=0.0).to_json())
    assert fork.metrics() == {"entropy_coef": 0.1}


@pytest.mark.parametrize(("saved", "taken_over"), [(0.9, 0.15), (0.0, 0.05)])
def test_the_coefficient_of_a_run_with_other_bounds_is_moved_to_these(saved: float, taken_over: float) -> None:
    fork = adaptive()
    fork.load_json({"entropy_coef": saved, "last_entropy": 0.5})
    assert fork.applied_coef == taken_over


def test_a_constant_coefficient_is_the_configs_and_not_the_checkpoints() -> None:
    constant = control(entropy_coef=0.2)
    constant.load_json({"entropy_coef": 0.1, "last_entropy": 1.0})
    assert constant.applied_coef == 0.2


@pytest.mark.parametrize(
    "state", [{}, {"entropy_coef": "x", "last_entropy": None}, {"entropy_coef": 1, "last_entropy": []}]
)
def test_a_damaged_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(HeadraceError, match="use an older checkpoint"):
        adaptive().load_json(state)
