"""The loss of each type against numbers computed by hand."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.objective.loss import PolicyLoss, StepTotals, policy_loss
from services.trainer.objective.loss_settings import LossSettings

Numbers = list[list[float]]
LN2 = math.log(2)


@dataclass
class Case:
    """A microbatch. It is the whole step unless totals say otherwise. None stands for the trainer's own logprobs."""

    trainer: Numbers
    advantages: list[float] | Numbers
    """One per row, or one per token."""
    old: Numbers | None = None
    generator: Numbers | None = None
    reference: Numbers | None = None
    entropies: Numbers | None = None
    mask: list[list[int]] | None = None
    shares: list[float] | None = None
    """Of each row in the sampled tokens of its rollout; None if each rollout has one row."""
    keep: list[list[int]] | None = None
    totals: StepTotals | None = None
    entropy_coef: float = 0.0
    dtype: torch.dtype = torch.float64


def loss_of(case: Case, **settings: Any) -> tuple[PolicyLoss, Numbers]:
    """Return the loss, and its gradient by trainer logprob; without correction unless the settings enable it."""
    trainer_BT = torch.tensor(case.trainer, dtype=case.dtype, requires_grad=True)
    advantages = torch.tensor(case.advantages)
    mask_BT = torch.ones_like(trainer_BT) if case.mask is None else torch.tensor(case.mask)
    num_tokens = int(mask_BT.sum())
    result = policy_loss(
        trainer_logprobs_BT=trainer_BT,
        old_logprobs_BT=_tensor(case.old, case.dtype),
        generator_logprobs_BT=trainer_BT.detach() if case.generator is None else torch.tensor(case.generator),
        reference_logprobs_BT=_tensor(case.reference, case.dtype),
        entropies_BT=torch.zeros_like(trainer_BT) if case.entropies is None else torch.tensor(case.entropies),
        advantages_BT=advantages if advantages.dim() == 2 else advantages[:, None],
        mask_BT=mask_BT,
        shares_B=torch.ones(len(case.trainer)) if case.shares is None else torch.tensor(case.shares),
        keep_BT=None if case.keep is None else torch.tensor(case.keep) == 1,
        totals=case.totals
        or StepTotals(num_rollouts=len(case.trainer), num_tokens=float(num_tokens), num_step_tokens=num_tokens),
        settings=replace(LossSettings(corrects=False), **settings),
        entropy_coef=case.entropy_coef,
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    gradient: Any = trainer_BT.grad
    return result, gradient.tolist()


def _tensor(numbers: Numbers | None, dtype: torch.dtype) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=dtype)


RAGGED = Case(trainer=[[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]], advantages=[0.5, -2.0], mask=[[1, 1, 0], [1, 1, 1]])
"""Two tokens of advantage 0.5 and three of -2, at a ratio of 1: the terms are -0.5, -0.5 and 2, 2, 2."""


@pytest.mark.parametrize(
    ("loss_type", "loss", "gradient"),
    [
        ("grpo", (-0.5 + 2.0) / 2, [[-0.5 / 4, -0.5 / 4, 0.0], [2 / 6, 2 / 6, 2 / 6]]),
        ("sapo", (-0.5 * 2 / 1.0 + 2.0 * 2 / 1.05) / 2, [[-0.5 / 4, -0.5 / 4, 0.0], [2 / 6, 2 / 6, 2 / 6]]),
        ("luspo", (-1.0 + 6.0) / 2, [[-0.5 / 2, -0.5 / 2, 0.0], [1.0, 1.0, 1.0]]),
        ("dr_grpo", (-1.0 + 6.0) / (2 * 10), [[-0.5 / 20, -0.5 / 20, 0.0], [0.1, 0.1, 0.1]]),
        ("bnpo", (-1.0 + 6.0) / 5, [[-0.1, -0.1, 0.0], [0.4, 0.4, 0.4]]),
        ("dapo", (-1.0 + 6.0) / 5, [[-0.1, -0.1, 0.0], [0.4, 0.4, 0.4]]),
        # -A log pi: 0.5 + 1 and -6 - 8 - 10.
        ("cispo", (1.5 - 24.0) / 5, [[-0.1, -0.1, 0.0], [0.4, 0.4, 0.4]]),
        ("vespo", (1.5 - 24.0) / 5, [[-0.1, -0.1, 0.0], [0.4, 0.4, 0.4]]),
    ],
)
def test_on_policy_each_loss_pulls_as_hard_as_its_normalisation_says(
    loss_type: str, loss: float, gradient: Numbers
) -> None:
    result, gradients = loss_of(RAGGED, loss_type=loss_type, epsilon_high=5.0, max_completion_length=10)
    assert result.loss.item() == pytest.approx(loss)
    for mine, expected in zip(gradients, gradient, strict=True):
        assert mine == pytest.approx(expected)


FORKED = Case(
    trainer=[[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0], [-5.0, -6.0, 0.0]],
    advantages=[0.5, 0.5, -2.0],
    mask=[[1, 0, 0], [1, 1, 1], [1, 1, 0]],
    shares=[0.25, 0.75, 1.0],
    totals=StepTotals(num_rollouts=2, num_tokens=6.0, num_step_tokens=6),
)
"""A rollout of two rows, with one and three tokens of advantage 0.5, and a rollout of one row with two of -2."""


@pytest.mark.parametrize(
    ("loss_type", "loss", "of_forked", "of_other"),
    [
        ("grpo", (-0.5 + 2.0) / 2, -0.5 / (4 * 2), 2 / (2 * 2)),
        ("sapo", (-0.5 * 2 / 1.0 + 2.0 * 2 / 1.05) / 2, -0.5 / (4 * 2), 2 / (2 * 2)),
        ("luspo", (4 * -0.5 + 2 * 2.0) / 2, -0.5 / 2, 2 / 2),
        ("dr_grpo", (4 * -0.5 + 2 * 2.0) / (2 * 10), -0.5 / 20, 2 / 20),
        ("bnpo", (4 * -0.5 + 2 * 2.0) / 6, -0.5 / 6, 2 / 6),
        ("dapo", (4 * -0.5 + 2 * 2.0) / 6, -0.5 / 6, 2 / 6),
        # -A log pi: 0.5 * (1 + 2 + 3 + 4) and -2 * (5 + 6).
        ("cispo", (5.0 - 22.0) / 6, -0.5 / 6, 2 / 6),
    ],
)
def test_a_rollout_of_two_rows_counts_once(loss_type: str, loss: float, of_forked: float, of_other: float) -> None:
    result, (first, second, other) = loss_of(FORKED, loss_type=loss_type, epsilon_high=5.0, max_completion_length=10)
    assert result.loss.item() == pytest.approx(loss)
    assert [first[0], *second] == pytest.approx([of_forked] * 4)
    assert other[:2] == pytest.approx([of_other] * 2)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "bnpo", "dapo", "cispo"])
def test_rows_add_up_to_the_rollout_that_they_were_cut_from(loss_type: str) -> None:
    trainer, old, reference = [-1.0, -2.5, -0.5, -3.0], [-1.5, -2.0, -0.75, -2.0], [-1.25, -2.25, -1.0, -3.5]
    totals = StepTotals(num_rollouts=3, num_tokens=7.5, num_step_tokens=9)
    whole = Case([trainer], [0.7], old=[old], generator=[old], reference=[reference], totals=totals)
    cut = replace(
        whole,
        trainer=[[*trainer[:1], 0.0, 0.0], trainer[1:]],
        old=[[*old[:1], 0.0, 0.0], old[1:]],
        generator=[[*old[:1], 0.0, 0.0], old[1:]],
        reference=[[*reference[:1], 0.0, 0.0], reference[1:]],
        advantages=[0.7, 0.7],
        mask=[[1, 0, 0], [1, 1, 1]],
        shares=[0.25, 0.75],
    )
    settings: dict[str, Any] = {"loss_type": loss_type, "epsilon_high": 1.3, "beta": 0.1}
    (of_whole, (gradient,)), (of_cut, (first, second)) = loss_of(whole, **settings), loss_of(cut, **settings)
    assert of_cut.loss.item() == pytest.approx(of_whole.loss.item(), rel=1e-12)
    assert [first[0], *second] == pytest.approx(gradient, rel=1e-12)


def test_a_ratio_of_the_sequence_is_that_of_the_row() -> None:
    """The first row's ratio is 2 and is clipped to 1.2; the second's is 1."""
    case = replace(FORKED, old=[[-1.0 - LN2, 0.0, 0.0], [-2.0, -3.0, -4.0], [-5.0, -6.0, 0.0]])
    result, (first, second, _) = loss_of(case, loss_type="grpo", is_sequence_level=True)
    assert result.loss.item() == pytest.approx((0.25 * -0.5 * 1.2 + 0.75 * -0.5 + 2.0) / 2)
    assert first[0] == 0.0
    assert second == pytest.approx([0.75 * -0.5 / (3 * 2)] * 3)


def test_the_only_row_of_a_rollout_counts_as_a_whole_one_bit_by_bit() -> None:
    torch.manual_seed(0)
    logprobs_BT = -torch.rand(5, 7) * 3
    mask_BT = (torch.rand(5, 7) < 0.6).float()
    mask_BT[:, 0] = 1.0
    advantages_B = torch.randn(5)
    given: list[Any] = [logprobs_BT.tolist(), advantages_B.tolist(), mask_BT.int().tolist()]
    logprobs, advantages, mask = given
    case = Case(logprobs, advantages, mask=mask, dtype=torch.float32)
    result, gradient = loss_of(case, loss_type="grpo")
    plain_BT = logprobs_BT.clone().requires_grad_()
    terms_BT = -torch.exp(plain_BT - plain_BT.detach()) * advantages_B[:, None] * mask_BT
    plain = (terms_BT.sum(1) / mask_BT.sum(1)).sum() / 5
    plain.backward()  # type: ignore[no-untyped-call]
    assert result.loss.item() == plain.item()
    assert plain_BT.grad is not None
    assert gradient == plain_BT.grad.tolist()


def test_the_parts_of_a_step_add_up_to_the_step_whatever_they_are_divided_by() -> None:
    totals = StepTotals(num_rollouts=4, num_tokens=12.5, num_step_tokens=20)
    case = replace(RAGGED, totals=totals)
    expected = {
        "grpo": (-0.5 + 2.0) / 4,  # rows that are left out of the loss count too
        "luspo": 5.0 / 4,
        "dr_grpo": 5.0 / (4 * 512),
        "bnpo": 5.0 / 20,
        "dapo": 5.0 / 12.5,  # tokens of the batch over its steps
    }
    losses = {loss_type: loss_of(case, loss_type=loss_type)[0].loss.item() for loss_type in expected}
    assert losses == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # good and already likelier by more than 28%: no further
        (1.5, -1.0, 1.5, 1.5),  # bad and likelier: pushed back in full
        (0.5, 1.0, -0.5, -0.5),  # good and less likely: pulled up in full
        (0.5, -1.0, 0.8, 0.0),  # bad and already less likely by more than 20%: no further
        (1.2, 1.0, -1.2, -1.2),  # inside the range
    ],
)
def test_the_ratio_is_clipped_where_clipping_makes_the_loss_larger(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    case = Case(trainer=[[0.0]], old=[[-math.log(ratio)]], advantages=[advantage])
    result, gradients = loss_of(case, epsilon_high=0.28)
    assert result.loss.item() == pytest.approx(loss)
    assert gradients[0][0] == pytest.approx(gradient)


def test_delta_bounds_what_a_bad_token_does_once_the_policy_has_run_towards_it() -> None:
    case = Case(trainer=[[0.0]], old=[[-math.log(8.0)]], advantages=[-1.0])
    unbounded, gradient = loss_of(case)
    assert [unbounded.loss.item(), gradient[0][0]] == pytest.approx([8.0, 8.0])
    bounded, gradient = loss_of(case, delta=4.0)
    assert [bounded.loss.item(), gradient[0][0]] == pytest.approx([4.0, 0.0])


def test_at_sequence_level_the_ratio_is_the_geometric_mean_of_the_tokens() -> None:
    # Ratios 4 and 1: the completion's is 2, which is clipped to 1.2 where it is good, and not where it is bad.
    good = Case(trainer=[[0.0, 0.0]], old=[[-2 * LN2, 0.0]], advantages=[1.0])
    result, gradient = loss_of(good, loss_type="grpo", is_sequence_level=True)
    assert result.loss.item() == pytest.approx(-1.2)
    assert gradient[0] == [0.0, 0.0]
    bad = Case(trainer=[[0.0, 0.0]], old=[[-2 * LN2, 0.0]], advantages=[-1.0])
    result, gradient = loss_of(bad, loss_type="grpo", is_sequence_level=True)
    assert result.loss.item() == pytest.approx(2.0)
    assert gradient[0] == pytest.approx([1.0, 1.0])  # 2 / 2 tokens


def test_luspo_counts_a_completion_as_often_as_it_has_tokens() -> None:
    case = Case(trainer=[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], advantages=[1.0, 1.0], mask=[[1, 0, 0], [1, 1, 1]])
    result, _ = loss_of(case, loss_type="luspo", is_sequence_level=True)
    assert result.loss.item() == pytest.approx(-(1 + 3) / 2)


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    # Ratios 8 and 1/2 of logprobs -1 and -2: weights 5 and 1/2.
    case = Case(trainer=[[-1.0, -2.0]], old=[[-1.0 - 3 * LN2, -2.0 + LN2]], advantages=[1.0])
    result, gradient = loss_of(case, loss_type="cispo", epsilon_high=5.0)
    assert result.loss.item() == pytest.approx((5 * 1.0 + 0.5 * 2.0) / 2)
    assert gradient[0] == pytest.approx([-5 / 2, -0.5 / 2])
    assert result.stats.metrics()["cispo_clip_ratio"] == pytest.approx(0.5)


def test_sapo_gates_softly_with_a_temperature_for_each_sign() -> None:
    # Ratio 2: sigmoid(tau (2 - 1)) * 4 / tau, and its derivative 4 s (1 - s) times the ratio.
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    case = Case(trainer=[[0.0], [0.0]], old=[[-LN2], [-LN2]], advantages=[1.0, -1.0])
    result, gradient = loss_of(case, loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    assert result.loss.item() == pytest.approx((-sigmoid(1.0) * 4 + sigmoid(2.0) * 2) / 2)
    slopes = [-4 * sigmoid(1.0) * (1 - sigmoid(1.0)) * 2, 4 * sigmoid(2.0) * (1 - sigmoid(2.0)) * 2]
    assert [row[0] for row in gradient] == pytest.approx([slope / 2 for slope in slopes])


def test_vespo_weighs_a_completion_by_the_product_of_its_ratios_and_its_corrections() -> None:
    # Ratios 2 and 1 of the loss, 1/2 and 3 of the correction: w = 3. phi(w) = e^lambda w^k e^(-lambda w).
    case = Case(
        trainer=[[-1.0, -1.0]],
        old=[[-1.0 - LN2, -1.0]],
        generator=[[-1.0, -1.0 - math.log(3)]],
        advantages=[-1.0],
    )
    result, gradient = loss_of(
        case, loss_type="vespo", corrects=True, correction_mode="token_truncate", correction_max=10.0
    )
    phi = math.exp(2.0) * 3.0**3 * math.exp(-2.0 * 3.0)  # k = 3 and lambda = 2 where the advantage is negative
    assert result.stats.metrics()["vespo/phi_seq_mean"] == pytest.approx(phi)
    assert result.loss.item() == pytest.approx(-phi * 2 / 2)
    assert gradient[0] == pytest.approx([phi / 2, phi / 2])


def test_vespo_takes_the_other_exponents_where_the_advantage_is_positive() -> None:
    case = Case(trainer=[[-1.0]], old=[[-1.0 - LN2]], advantages=[1.0])
    result, _ = loss_of(case, loss_type="vespo")
    assert result.loss.item() == pytest.approx(math.exp(3.0) * 2.0**2 * math.exp(-3.0 * 2.0))


def test_the_kl_term_is_k3_and_stands_outside_clip_and_weights() -> None:
    # pi_ref / pi = 1/2: k3 = 1/2 - log 1/2 - 1, with derivative 1 - 1/2 by log pi.
    k3 = 0.5 + LN2 - 1
    case = Case(trainer=[[-1.0]], reference=[[-1.0 - LN2]], generator=[[-1.0 - 3 * LN2]], advantages=[0.0])
    settings: dict[str, Any] = {"beta": 0.1, "corrects": True, "correction_mode": "token_truncate"}
    result, gradient = loss_of(case, use_bias_correction_kl=False, **settings)
    assert result.loss.item() == pytest.approx(0.1 * k3)
    assert gradient[0][0] == pytest.approx(0.1 * 0.5)
    assert result.stats.metrics()["kl"] == pytest.approx(k3)


def test_bias_correction_multiplies_the_kl_term_by_the_ratio_and_differentiates_both() -> None:
    # The derivative of r k3 by log pi at r = 2 is r k3 + r (1 - 1/2).
    k3 = 0.5 + LN2 - 1
    case = Case(trainer=[[-1.0]], old=[[-1.0 - LN2]], reference=[[-1.0 - LN2]], advantages=[0.0])
    result, gradient = loss_of(case, beta=0.1)
    assert result.loss.item() == pytest.approx(0.1 * 2 * k3)
    assert gradient[0][0] == pytest.approx(0.1 * (2 * k3 + 2 * 0.5))


BOUND = math.exp(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss_type", "advantage", "delta", "loss"),
    [
        # Good, and e^100 times as likely as before: the clip limits the ratio to 1.2.
        *((loss_type, 1.0, None, -1.2) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
        # Bad: delta limits it to 4; without delta, the bound of all ratios applies.
        *((loss_type, -1.0, 4.0, 4.0) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
        ("dapo", -1.0, None, BOUND),
        # The gate is shut: sigmoid is 1, times 4 / tau.
        ("sapo", 1.0, None, -4 / 1.0),
        ("sapo", -1.0, None, 4 / 1.05),
        ("dapo", 0.0, None, 0.0),
    ],
)
def test_a_ratio_beyond_any_float_has_the_loss_of_the_largest_one_and_no_gradient(
    loss_type: Any, advantage: float, delta: float | None, loss: float, dtype: torch.dtype
) -> None:
    case = Case(trainer=[[0.0]], old=[[-100.0]], advantages=[advantage], dtype=dtype)
    result, gradient = loss_of(case, loss_type=loss_type, delta=delta, max_completion_length=1)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert gradient == [[0.0]]
    assert result.stats.metrics()["num_bounded_ratios"] == 1


def test_at_sequence_level_the_bound_is_of_the_completions_ratio() -> None:
    case = Case(trainer=[[0.0, 0.0]], old=[[-100.0, -102.0]], advantages=[-1.0], dtype=torch.float32)
    result, gradient = loss_of(case, loss_type="grpo", is_sequence_level=True)
    assert result.loss.item() == pytest.approx(BOUND, rel=1e-5)
    assert gradient == [[0.0, 0.0]]
    assert result.stats.metrics()["num_bounded_ratios"] == 1


def test_a_ratio_within_the_bound_is_unchanged() -> None:
    case = Case(trainer=[[0.0, 0.0]], old=[[-19.5, -20.5]], advantages=[-1.0])
    result, gradient = loss_of(case)
    assert result.loss.item() == pytest.approx((math.exp(19.5) + BOUND) / 2)
    assert gradient[0] == [pytest.approx(math.exp(19.5) / 2), 0.0]
    assert result.stats.metrics()["num_bounded_ratios"] == 1


def test_a_reference_that_is_far_from_the_policy_is_bounded_too() -> None:
    case = Case(trainer=[[-100.0]], reference=[[0.0]], advantages=[0.0], dtype=torch.float32)
    result, gradient = loss_of(case, beta=0.1, use_bias_correction_kl=False)
    assert result.stats.metrics()["kl"] == pytest.approx(BOUND - 21, rel=1e-5)
    assert result.loss.item() == pytest.approx(0.1 * (BOUND - 21), rel=1e-5)
    assert gradient == [[0.0]]
    assert result.stats.metrics()["num_bounded_ratios"] == 1


def test_a_correction_weight_without_an_upper_bound_is_bounded_too_and_one_that_is_cut_is_not_counted() -> None:
    case = Case(trainer=[[0.0]], generator=[[-100.0]], advantages=[1.0], dtype=torch.float32)
    free: dict[str, Any] = {"corrects": True, "correction_mode": "token_mask", "correction_max": None}
    result, gradient = loss_of(case, **free)
    assert result.loss.item() == pytest.approx(-BOUND, rel=1e-5)
    assert gradient[0][0] == pytest.approx(-BOUND, rel=1e-5)
    metrics = result.stats.metrics()
    assert metrics["num_bounded_ratios"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    result, _ = loss_of(case, **(free | {"correction_max": 3.0}))
    assert result.stats.metrics()["num_bounded_ratios"] == 0
    assert result.stats.metrics()["sampling/truncated_share"] == 1


def test_k3_keeps_its_digits_where_policy_and_reference_agree() -> None:
    # x = 1e-4: x^2 / 2 + x^3 / 6. In float32, exp(x) - x - 1 would have no correct digit.
    case = Case(trainer=[[0.0]], reference=[[1e-4]], advantages=[0.0], dtype=torch.float32)
    result, _ = loss_of(case, beta=1.0, use_bias_correction_kl=False)
    assert result.loss.item() == pytest.approx(1e-8 / 2 + 1e-12 / 6, rel=5e-3)


def test_k3_is_never_negative_in_float32() -> None:
    references = [[step * 1e-5 for step in range(-200, 200)]]
    case = Case(trainer=[[0.0] * 400], reference=references, advantages=[0.0], dtype=torch.float32)
    for numbers in zip(*references, strict=True):
        one = replace(case, trainer=[[0.0]], reference=[list(numbers)])
        assert loss_of(one, beta=1.0, use_bias_correction_kl=False)[0].loss.item() >= 0


def test_each_token_may_have_its_own_advantage() -> None:
    # Ratios 1.5 and 0.5: the first is clipped to 1.2 where it is good, the second to 0.8 where it is bad.
    old = [[-math.log(1.5), -math.log(0.5), -math.log(1.5)]]
    case = Case(trainer=[[0.0, 0.0, 0.0]], old=old, advantages=[[2.0, -1.0, -3.0]])
    result, gradient = loss_of(case)
    assert result.loss.item() == pytest.approx((-1.2 * 2 + 0.8 * 1 + 1.5 * 3) / 3)
    assert gradient[0] == pytest.approx([0.0, 0.0, 1.5])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_advantage_for_all_tokens_is_the_same_advantage_at_each(loss_type: Any, dtype: torch.dtype) -> None:
    case = replace(RAGGED, old=[[-1.5, -1.5, 0.0], [-3.5, -3.5, -5.5]], dtype=dtype)
    each = replace(case, advantages=[[0.5, 0.5, float("nan")], [-2.0, -2.0, -2.0]])
    settings: dict[str, Any] = {"loss_type": loss_type, "epsilon_high": 5.0, "off_policy_mask_threshold": 0.1}
    (one_loss, one_gradient), (each_loss, each_gradient) = loss_of(case, **settings), loss_of(each, **settings)
    assert one_loss.loss.item() == each_loss.loss.item()
    assert one_gradient == each_gradient
    assert math.isfinite(one_loss.loss.item())


def test_vespo_and_the_off_policy_mask_go_by_the_sign_of_the_tokens_advantage() -> None:
    # w = 2 for the completion: phi is e^3 2^2 e^-6 where the advantage is positive, e^2 2^3 e^-4 where it is negative.
    case = Case(trainer=[[-1.0, -1.0]], old=[[-1.0 - LN2, -1.0]], advantages=[[1.0, -1.0]])
    result, gradient = loss_of(case, loss_type="vespo")
    good, bad = math.exp(-3) * 4, math.exp(-2) * 8
    assert gradient[0] == pytest.approx([-good / 2, bad / 2])
    assert result.stats.metrics()["vespo/phi_seq_mean"] == pytest.approx((good + bad) / 2)
    # The policy has moved away by 0.5 nats per token, so bad completions no longer have an effect.
    left = Case(trainer=[[-1.5, -1.5]], generator=[[-1.0, -1.0]], advantages=[[1.0, -1.0]])
    _, gradient = loss_of(left, off_policy_mask_threshold=0.3)
    assert gradient[0] == [pytest.approx(-0.5), 0.0]


def test_a_kl_term_without_reference_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta=0.1 needs reference_logprobs_BT"):
        loss_of(Case(trainer=[[0.0]], advantages=[1.0]), beta=0.1)


def test_tokens_of_low_entropy_leave_the_policy_loss_and_still_count_in_its_divisor_and_in_the_kl_term() -> None:
    case = Case(trainer=[[-1.0, -1.0]], reference=[[-1.0 - LN2, -1.0 - LN2]], advantages=[1.0], keep=[[1, 0]])
    result, gradient = loss_of(case, beta=0.1, use_bias_correction_kl=False)
    k3 = 0.5 + LN2 - 1
    assert result.loss.item() == pytest.approx((-1.0 + 2 * 0.1 * k3) / 2)
    assert gradient[0] == pytest.approx([(-1.0 + 0.05) / 2, 0.05 / 2])


def test_the_entropy_bonus_is_a_mean_over_the_tokens_it_acts_on() -> None:
    case = Case(trainer=[[-1.0, -1.0]], advantages=[1.0], entropies=[[2.0, 4.0]], entropy_coef=0.1)
    result, _ = loss_of(case, has_entropy_bonus=True, loss_type="grpo")
    assert result.loss.item() == pytest.approx(-1.0 - 0.1 * 3.0)
    metrics = result.stats.metrics()
    assert [metrics["policy_loss"], metrics["entropy"]] == pytest.approx([-1.0, 3.0])

    totals = StepTotals(num_rollouts=1, num_tokens=2.0, num_step_tokens=2, num_kept_tokens=1)
    kept = replace(case, keep=[[0, 1]], totals=totals)
    result, _ = loss_of(kept, has_entropy_bonus=True, loss_type="grpo")
    assert result.loss.item() == pytest.approx(-0.5 - 0.1 * 4.0)
    assert result.stats.bonus_entropy_sum / result.stats.num_bonus_tokens == 4.0
    assert result.stats.metrics()["entropy"] == pytest.approx(3.0)


def test_the_entropy_bonus_is_differentiated() -> None:
    entropies = torch.tensor([[2.0, 4.0]], requires_grad=True)
    loss = policy_loss(
        trainer_logprobs_BT=torch.zeros(1, 2),
        old_logprobs_BT=None,
        generator_logprobs_BT=torch.zeros(1, 2),
        reference_logprobs_BT=None,
        entropies_BT=entropies,
        advantages_BT=torch.ones(1, 1),
        mask_BT=torch.ones(1, 2),
        shares_B=torch.ones(1),
        keep_BT=None,
        totals=StepTotals(num_rollouts=1, num_tokens=2.0, num_step_tokens=2),
        settings=LossSettings(has_entropy_bonus=True),
        entropy_coef=0.1,
    ).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert entropies.grad is not None
    assert entropies.grad.tolist() == [pytest.approx([-0.05, -0.05])]


def test_an_entropy_bonus_over_kept_tokens_needs_their_number() -> None:
    case = Case(trainer=[[-1.0, -1.0]], advantages=[1.0], keep=[[0, 1]], entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"needs totals\.num_kept_tokens"):
        loss_of(case, has_entropy_bonus=True)


def test_values_outside_the_mask_are_never_read() -> None:
    nan = float("nan")
    case = Case(
        trainer=[[-1.0, nan]],
        old=[[-1.0, nan]],
        generator=[[-1.0, -math.inf]],
        reference=[[-1.0, nan]],
        entropies=[[1.0, nan]],
        advantages=[1.0],
        mask=[[1, 0]],
        entropy_coef=0.1,
    )
    for loss_type in ("dapo", "grpo", "cispo", "vespo", "sapo"):
        settings: dict[str, Any] = {"loss_type": loss_type, "beta": 0.1, "has_entropy_bonus": True, "epsilon_high": 5.0}
        result, gradient = loss_of(case, corrects=True, correction_mode="token_mask", **settings)
        assert math.isfinite(result.loss.item())
        assert gradient[0][0] != 0
        assert gradient[0][1] == 0
        assert all(math.isfinite(value) for value in result.stats.metrics().values())


def test_a_microbatch_without_a_token_has_loss_and_gradient_zero_and_no_means() -> None:
    totals = StepTotals(num_rollouts=1, num_tokens=1.0, num_step_tokens=1)
    result, gradient = loss_of(Case(trainer=[[float("nan")]], advantages=[1.0], mask=[[0]], totals=totals))
    assert (result.loss.item(), gradient) == (0.0, [[0.0]])
    metrics = result.stats.metrics()
    assert (metrics.pop("loss"), metrics.pop("num_bounded_ratios")) == (0.0, 0.0)
    assert all(map(math.isnan, metrics.values()))
