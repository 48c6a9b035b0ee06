"""Correction weights, decoupling and masks against numbers computed by hand."""

import math
from typing import Any

import pytest
import torch

from services.trainer.objective.importance import correction_weights, log_ratios, off_policy_mask
from services.trainer.objective.loss_settings import LossSettings
from tests.trainer.objective.test_loss import Case, loss_of

LN2 = math.log(2)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
DIFFERENCE = torch.log(torch.tensor([[2.0, 5.0, 0.5], [0.5, 0.5, 99.0]]))
"""Ratios of the tokens; the ratios of the completions are 5 and 1/4."""


@pytest.mark.parametrize(
    ("mode", "bounds", "weights"),
    [
        ("token_truncate", (None, 3.0), [[2.0, 3.0, 0.5], [0.5, 0.5, 1.0]]),
        ("token_truncate", (0.75, None), [[2.0, 5.0, 0.75], [0.75, 0.75, 1.0]]),
        ("token_mask", (None, 3.0), [[2.0, 0.0, 0.5], [0.5, 0.5, 1.0]]),
        ("token_mask", (0.75, 3.0), [[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),
        ("token_mask", (None, None), [[2.0, 5.0, 0.5], [0.5, 0.5, 1.0]]),
        ("sequence_truncate", (0.5, 3.0), [[3.0], [0.5]]),
        ("sequence_mask", (None, 3.0), [[0.0], [0.25]]),
        ("sequence_mask", (0.5, None), [[5.0], [0.0]]),
    ],
)
def test_weights_outside_the_bounds_are_moved_there_or_zeroed(
    mode: Any, bounds: tuple[float | None, float | None], weights: list[list[float]]
) -> None:
    settings = LossSettings(correction_mode=mode, correction_min=bounds[0], correction_max=bounds[1])
    result = correction_weights(DIFFERENCE, MASK, settings)
    assert result.tolist() == [pytest.approx(row) for row in weights]


def test_a_weight_on_the_bound_is_inside() -> None:
    settings = LossSettings(correction_mode="token_mask", correction_min=1.0, correction_max=1.0)
    assert correction_weights(torch.zeros(1, 2), torch.ones(1, 2), settings).tolist() == [[1.0, 1.0]]


def test_a_completions_ratio_is_a_mean_of_logs_over_its_own_tokens() -> None:
    assert log_ratios(DIFFERENCE, MASK, is_sequence_level=False) is DIFFERENCE
    means = log_ratios(DIFFERENCE, MASK, is_sequence_level=True)
    assert means.flatten().tolist() == pytest.approx([math.log(5) / 3, -LN2])


def test_only_bad_completions_that_the_policy_has_left_are_masked() -> None:
    # log pi_gen - log pi is 0.5 a token in rows 0 and 1, 0.1 in row 2.
    trainer = torch.tensor([[-1.5, -1.5], [-1.5, -1.5], [-1.1, -1.1]])
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]])
    kept = off_policy_mask(trainer, torch.full((3, 2), -1.0), advantages, torch.ones(3, 2), 0.3)
    assert kept.tolist() == [[0.0], [1.0], [1.0]]


def test_weights_multiply_the_loss_and_are_not_differentiated() -> None:
    case = Case(trainer=[[0.0, 0.0, 0.0]], generator=[[-LN2, -math.log(5), LN2]], advantages=[1.0])
    result, gradient = loss_of(case, corrects=True, correction_mode="token_truncate", correction_max=3.0)
    assert result.loss.item() == pytest.approx(-(2 + 3 + 0.5) / 3)
    assert gradient[0] == pytest.approx([-2 / 3, -3 / 3, -0.5 / 3])
    metrics = result.stats.metrics()
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(5.5 / 3)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)
    assert metrics["sampling/truncated_share"] == pytest.approx(1 / 3)


def test_a_masked_completion_teaches_nothing() -> None:
    case = Case(trainer=[[0.0, 0.0], [0.0, 0.0]], generator=[[-LN2, -LN2], [-LN2, 0.0]], advantages=[1.0, 1.0])
    result, gradient = loss_of(case, corrects=True, correction_mode="sequence_mask", correction_max=3.0)
    assert gradient == [[0.0, 0.0], pytest.approx([-0.5, -0.5])]  # weights 4, beyond the bound, and 2
    assert result.stats.metrics()["sampling/truncated_share"] == pytest.approx(0.5)
    assert result.stats.metrics()["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)


def test_a_completion_off_policy_and_bad_teaches_nothing() -> None:
    case = Case(trainer=[[-1.5], [-1.5]], generator=[[-1.0], [-1.0]], advantages=[-1.0, 1.0])
    _, gradient = loss_of(case, off_policy_mask_threshold=0.3)
    assert gradient == [[0.0], [pytest.approx(-0.5)]]


def test_decoupled_the_clip_is_around_the_batchs_beginning_and_the_weight_covers_the_rest() -> None:
    # pi / pi_old = 1.1, inside the clip; pi_old / pi_gen = 2.
    case = Case(trainer=[[0.0]], old=[[-math.log(1.1)]], generator=[[-math.log(2.2)]], advantages=[1.0])
    settings: dict[str, Any] = {"corrects": True, "correction_mode": "token_truncate", "correction_max": 3.0}
    result, gradient = loss_of(case, **settings)
    assert result.loss.item() == pytest.approx(-2.2)
    assert gradient[0][0] == pytest.approx(-2.2)


def test_coupled_the_clip_is_around_the_policy_that_sampled() -> None:
    # pi / pi_gen = 2.2 is clipped to 1.2, whatever the policy at the beginning of the batch was.
    case = Case(trainer=[[0.0]], old=[[-math.log(1.1)]], generator=[[-math.log(2.2)]], advantages=[1.0])
    result, gradient = loss_of(case, use_decoupled_loss=False)
    assert result.loss.item() == pytest.approx(-1.2)
    assert gradient[0][0] == 0.0
    assert "sampling/importance_sampling_ratio/mean" not in result.stats.metrics()
