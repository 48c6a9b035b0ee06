"""Statistics of tokens: which ones are reported for which loss, and that they are consistent."""

import math
from typing import Any

import pytest

from services.trainer.objective.loss import StepTotals
from services.trainer.objective.token_stats import TokenStats
from tests.trainer.objective.test_loss import Case, loss_of

LN2 = math.log(2)
SAMPLING = {"corrects": True, "correction_mode": "token_truncate"}
ALWAYS = (
    {"loss", "entropy", "mismatch_kl/k1", "mismatch_kl/k3", "effective_sample_size"}
    | {"sampling/no_logprob_share", "num_bounded_ratios"}
    | {f"sampling/sampling_logp_difference/{what}" for what in ("mean", "max")}
)
CLIP = {f"clip_ratio/{what}" for what in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
WEIGHTS = {f"sampling/importance_sampling_ratio/{what}" for what in ("min", "mean", "max")}


@pytest.mark.parametrize(
    ("settings", "metrics"),
    [
        ({"loss_type": "dapo"}, CLIP),
        ({"loss_type": "luspo", "is_sequence_level": True}, CLIP),
        ({"loss_type": "sapo"}, set[str]()),
        ({"loss_type": "cispo"}, {"cispo_clip_ratio"}),
        ({"loss_type": "vespo"}, {"vespo/phi_seq_mean"}),
        ({"loss_type": "sapo", "beta": 0.1}, {"kl"}),
        ({"loss_type": "sapo", "has_entropy_bonus": True}, {"policy_loss"}),
        ({"loss_type": "sapo", **SAMPLING}, WEIGHTS | {"sampling/truncated_share"}),
    ],
)
def test_each_loss_has_the_metrics_that_it_has_in_trl(settings: dict[str, Any], metrics: set[str]) -> None:
    result, _ = loss_of(Case(trainer=[[-1.0]], reference=[[-1.5]], advantages=[1.0]), **settings)
    assert set(result.stats.metrics()) == ALWAYS | metrics


def test_clip_ratios_are_shares_of_tokens_with_the_extremes_of_completions() -> None:
    low, high, inside = LN2, -math.log(1.5), 0.0
    case = Case(
        trainer=[[0.0] * 4, [0.0] * 4, [0.0] * 4],
        # Row 0: 2 of 4 clipped low. Row 1: 1 of 2 clipped high. Row 2: advantage 0 clips nothing.
        old=[[low, low, inside, inside], [high, inside, high, high], [high, high, low, low]],
        advantages=[-1.0, 1.0, 0.0],
        mask=[[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]],
    )
    metrics = loss_of(case)[0].stats.metrics()
    assert metrics["clip_ratio/low_mean"] == pytest.approx(2 / 10)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 10)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(3 / 10)
    assert metrics["clip_ratio/low_min"] == 0.0
    assert metrics["clip_ratio/high_max"] == pytest.approx(0.5)


def test_at_sequence_level_clip_ratios_are_shares_of_completions() -> None:
    case = Case(
        trainer=[[0.0, 0.0], [0.0, 0.0]], old=[[LN2, LN2], [0.0, 0.0]], advantages=[-1.0, -1.0], mask=[[1, 1], [1, 0]]
    )
    metrics = loss_of(case, is_sequence_level=True)[0].stats.metrics()
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 2)
    assert (metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"]) == (0.0, 0.0)


def test_the_mismatch_between_trainer_and_generator_is_measured() -> None:
    # Differences log 2 and -log 4, so ratios 2 and 1/4.
    case = Case(trainer=[[0.0, 0.0]], generator=[[-LN2, 2 * LN2]], entropies=[[0.5, 1.5]], advantages=[1.0])
    metrics = loss_of(case)[0].stats.metrics()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 * LN2)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(2 * LN2)
    assert metrics["mismatch_kl/k1"] == pytest.approx(0.5 * LN2)  # -(log 2 - 2 log 2) / 2
    assert metrics["mismatch_kl/k3"] == pytest.approx((2 + 0.25) / 2 - 1 + 0.5 * LN2)
    assert metrics["effective_sample_size"] == pytest.approx(2.25**2 / (2 * (4 + 1 / 16)))
    assert metrics["entropy"] == 1.0


def test_tokens_with_an_unknown_generator_logprob_are_counted_and_left_out_of_the_mismatch() -> None:
    nan = math.nan
    case = Case(trainer=[[0.0, 0.0], [0.0, 0.0]], generator=[[-LN2, nan], [2 * LN2, nan]], advantages=[1.0, 1.0])
    metrics = loss_of(case, corrects=True, correction_mode="token_truncate", correction_max=3.0)[0].stats.metrics()
    assert metrics["sampling/no_logprob_share"] == 0.5
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 * LN2)
    assert metrics["mismatch_kl/k1"] == pytest.approx(0.5 * LN2)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx((2 + 0.25 + 1 + 1) / 4)
    unknown = Case(trainer=[[0.0]], generator=[[nan]], advantages=[1.0])
    assert loss_of(unknown)[0].stats.metrics()["sampling/no_logprob_share"] == 1.0


def parts() -> tuple[TokenStats, TokenStats, TokenStats]:
    """Return the statistics of two microbatches, and of one microbatch with the rows of both."""
    trainer = [[-1.0, -0.5], [-2.0, -0.25]]
    old = [[-1.1, -1.5], [-2.5, -0.2]]
    generator = [[-1.5, -0.25], [-1.0, -3.0]]
    advantages = [1.0, -1.0]
    totals = StepTotals(num_rollouts=2, num_tokens=4.0, num_step_tokens=4)

    def of(rows: slice) -> TokenStats:
        case = Case(trainer[rows], advantages[rows], old=old[rows], generator=generator[rows], totals=totals)
        return loss_of(case, corrects=True, correction_mode="token_mask", correction_max=2.0)[0].stats

    return of(slice(0, 1)), of(slice(1, 2)), of(slice(0, 2))


def test_statistics_of_two_microbatches_add_up_to_the_statistics_of_one() -> None:
    first, second, whole = parts()
    assert (first + second).metrics() == pytest.approx(whole.metrics())
    assert (TokenStats() + first).to_floats() == first.to_floats() == (first + TokenStats()).to_floats()


def test_statistics_travel_between_ranks_as_a_list_of_floats() -> None:
    first, second, _ = parts()
    assert TokenStats.from_floats(first.to_floats()) == first
    assert TokenStats.from_floats(TokenStats().to_floats()) + second == second
