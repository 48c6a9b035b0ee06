"""The loss against numbers worked out by hand, and against TRL's formula written out token by token in float64."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.trainer.loss import TokenLoss, dapo_token_loss

Floats = npt.NDArray[np.float64]


def loss_of(
    trainer: list[list[float]],
    *,
    advantages: list[float],
    old: list[list[float]] | None = None,
    generator: list[list[float]] | None = None,
    mask: list[list[int]] | None = None,
    cap: float | None = 3.0,
) -> tuple[TokenLoss, Any]:
    """Return the loss of these sequences, and its gradient by trainer logprob."""
    trainer_BT = torch.tensor(trainer, dtype=torch.float64, requires_grad=True)
    result = dapo_token_loss(
        trainer_logprobs_BT=trainer_BT,
        old_logprobs_BT=trainer_BT.detach() if old is None else torch.tensor(old, dtype=torch.float64),
        generator_logprobs_BT=trainer_BT.detach()
        if generator is None
        else torch.tensor(generator, dtype=torch.float64),
        advantages_B=torch.tensor(advantages),
        mask_BT=torch.ones_like(trainer_BT) if mask is None else torch.tensor(mask),
        clip_range=(0.8, 1.28),
        importance_cap=cap,
        entropies_BT=torch.ones_like(trainer_BT),
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    gradient: Any = trainer_BT.grad
    return result, gradient.tolist()


def log(ratio: float) -> float:
    return math.log(ratio)


def test_on_policy_the_loss_is_minus_the_advantage_a_token_and_so_is_its_gradient() -> None:
    result, gradient = loss_of([[-1.0, -2.0], [-3.0, -4.0]], advantages=[0.5, -2.0])
    assert result.loss.item() == pytest.approx(-0.5 - 0.5 + 2.0 + 2.0)
    assert gradient == [[-0.5, -0.5], [2.0, 2.0]]


def test_the_loss_is_a_sum_and_the_number_of_tokens_is_given_beside_it() -> None:
    result, _ = loss_of([[-1.0, -2.0], [-3.0, -4.0]], advantages=[1.0, 1.0], mask=[[1, 1], [1, 0]])
    assert result.loss.item() == pytest.approx(-3.0)
    assert result.stats.num_tokens == 3
    assert result.stats.metrics()["loss"] == pytest.approx(-1.0)


def test_what_stands_outside_the_mask_is_never_looked_at() -> None:
    nan = float("nan")
    result, gradient = loss_of(
        [[-1.0, nan]], advantages=[1.0], old=[[-1.0, nan]], generator=[[-1.0, -math.inf]], mask=[[1, 0]]
    )
    assert result.loss.item() == pytest.approx(-1.0)
    assert gradient[0][0] == pytest.approx(-1.0)
    assert all(math.isfinite(value) for value in result.stats.metrics().values())


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
    result, gradients = loss_of([[0.0]], old=[[-log(ratio)]], advantages=[advantage])
    assert result.loss.item() == pytest.approx(loss)
    assert gradients[0][0] == pytest.approx(gradient)


def test_clip_ratios_are_shares_of_tokens_with_the_extremes_of_sequences() -> None:
    low, high, inside = -log(0.5), -log(1.5), 0.0
    result, _ = loss_of(
        [[0.0] * 4, [0.0] * 4, [0.0] * 4],
        # Sequence 0: 2 of 4 clipped low. Sequence 1: 1 of 2 clipped high. Sequence 2: advantage 0 clips nothing.
        old=[[low, low, inside, inside], [high, inside, high, high], [high, high, low, low]],
        advantages=[-1.0, 1.0, 0.0],
        mask=[[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]],
    )
    metrics = result.stats.metrics()
    assert metrics["clip_ratio/low_mean"] == pytest.approx(2 / 10)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 10)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(3 / 10)
    assert metrics["clip_ratio/low_min"] == 0.0
    assert metrics["clip_ratio/high_max"] == pytest.approx(0.5)


def test_importance_weights_are_truncated_at_the_cap_and_are_not_differentiated() -> None:
    # Importance ratios 2, 5, 1/2, of which the second is cut to 3.
    result, gradient = loss_of([[0.0, 0.0, 0.0]], generator=[[-log(2), -log(5), log(2)]], advantages=[1.0])
    assert result.loss.item() == pytest.approx(-(2 + 3 + 0.5))
    assert gradient[0] == pytest.approx([-2.0, -3.0, -0.5])
    metrics = result.stats.metrics()
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(5.5 / 3)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)
    assert metrics["sampling/truncated_share"] == pytest.approx(1 / 3)


def test_without_a_cap_there_is_no_importance_weight() -> None:
    result, gradient = loss_of([[0.0, 0.0]], generator=[[-log(2), -log(5)]], advantages=[1.0], cap=None)
    assert result.loss.item() == pytest.approx(-2.0)
    assert gradient[0] == pytest.approx([-1.0, -1.0])


def test_the_mismatch_between_trainer_and_generator_is_measured() -> None:
    # Differences log 2 and -log 4, so ratios 2 and 1/4.
    result, _ = loss_of([[0.0, 0.0]], generator=[[-log(2), log(4)]], advantages=[1.0])
    metrics = result.stats.metrics()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 * log(2))
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(2 * log(2))
    assert metrics["mismatch_kl/k1"] == pytest.approx(0.5 * log(2))  # -(log 2 - 2 log 2) / 2
    assert metrics["mismatch_kl/k3"] == pytest.approx((2 + 0.25) / 2 - 1 + 0.5 * log(2))
    assert metrics["effective_sample_size"] == pytest.approx(2.25**2 / (2 * (4 + 1 / 16)))
    assert metrics["entropy"] == 1.0


def test_statistics_of_two_microbatches_add_up_to_those_of_one() -> None:
    trainer = [[-1.0, -0.5], [-2.0, -0.25]]
    generator = [[-1.5, -0.25], [-1.0, -3.0]]
    old = [[-1.1, -1.5], [-2.5, -0.2]]
    whole, _ = loss_of(trainer, old=old, generator=generator, advantages=[1.0, -1.0])
    first, _ = loss_of(trainer[:1], old=old[:1], generator=generator[:1], advantages=[1.0])
    second, _ = loss_of(trainer[1:], old=old[1:], generator=generator[1:], advantages=[-1.0])
    assert (first.stats + second.stats).metrics() == pytest.approx(whole.stats.metrics())


def reference(
    trainer: Floats, old: Floats, generator: Floats, advantages: Floats, mask: npt.NDArray[np.int64]
) -> tuple[float, Floats]:
    """Return TRL 1.16's dapo loss with token_truncate at cap 3, before its division, and its derivative."""
    loss, gradient = 0.0, np.zeros(trainer.shape)
    for b in range(trainer.shape[0]):
        for t in range(trainer.shape[1]):
            if not mask[b, t]:
                continue
            advantage = float(advantages[b])
            coef_1 = math.exp(trainer[b, t] - old[b, t])
            coef_2 = min(max(coef_1, 1 - 0.2), 1 + 0.28)
            weight = min(math.exp(trainer[b, t] - generator[b, t]), 3.0)
            loss += -min(coef_1 * advantage, coef_2 * advantage) * weight
            if coef_1 * advantage <= coef_2 * advantage:  # the branch that moves with the policy
                gradient[b, t] = -coef_1 * advantage * weight
    return loss, gradient


def test_loss_and_gradient_conform_to_trls_formula_on_a_random_batch() -> None:
    rng = np.random.default_rng(0)
    shape = (8, 32)
    trainer = -rng.exponential(1.0, shape)
    old = trainer + rng.normal(0, 0.3, shape)
    generator = trainer + rng.normal(0, 0.8, shape)
    advantages = rng.integers(-8, 9, 8) / 4  # exact in float32
    mask = (rng.random(shape) < 0.7).astype(np.int64)
    expected_loss, expected_gradient = reference(trainer, old, generator, advantages, mask)
    result, gradient = loss_of(
        trainer.tolist(),
        old=old.tolist(),
        generator=generator.tolist(),
        advantages=advantages.tolist(),
        mask=mask.tolist(),
    )
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
    # The batch really has every case in it.
    metrics = result.stats.metrics()
    assert metrics["clip_ratio/low_mean"] > 0
    assert metrics["clip_ratio/high_mean"] > 0
    assert metrics["sampling/truncated_share"] > 0
