import math

import pytest
import torch

from services.trainer.token_logprobs import CHUNK_POSITIONS, token_entropies, token_logprobs


def test_logprobs_and_entropy_of_a_distribution_known_by_hand() -> None:
    # Probabilities 1/2, 1/4, 1/4, up to a constant that the softmax takes out.
    logits_NV = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0
    assert token_logprobs(logits_NV, torch.tensor([1]), temperature=1.0).item() == pytest.approx(-math.log(4))
    assert token_entropies(logits_NV, temperature=1.0).item() == pytest.approx(1.5 * math.log(2))


def test_the_temperature_divides_the_logits() -> None:
    # At temperature 1/2 probabilities are squared: 1/4, 1/16, 1/16 of 3/8.
    logits_NV = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert token_logprobs(logits_NV, torch.tensor([0]), temperature=0.5).item() == pytest.approx(math.log(2 / 3))
    assert token_logprobs(logits_NV, torch.tensor([2]), temperature=0.5).item() == pytest.approx(math.log(1 / 6))


def test_a_token_that_cannot_be_sampled_adds_nothing_to_the_entropy() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -math.inf]])
    assert token_entropies(logits_NV, temperature=1.0).item() == pytest.approx(math.log(2))


def test_entropies_are_the_same_in_one_chunk_and_in_several() -> None:
    logits_NV = torch.randn(2 * CHUNK_POSITIONS + 3, 5, generator=torch.Generator().manual_seed(0))
    probabilities = logits_NV.double().softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(token_entropies(logits_NV, temperature=1.0).double(), expected, atol=1e-6, rtol=0)


def test_the_gradient_is_the_chosen_token_less_the_distribution() -> None:
    logits_NV = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    token_logprobs(logits_NV, torch.tensor([1]), temperature=1.0).sum().backward()  # type: ignore[no-untyped-call]
    assert logits_NV.grad is not None
    torch.testing.assert_close(logits_NV.grad, torch.tensor([[-0.5, 0.75, -0.25]]))


def test_logits_in_bfloat16_are_summed_in_float32() -> None:
    # 1024 equal logits: log 1024 = 6.93147; in bfloat16 it would come out as 6.9375.
    logprob = token_logprobs(torch.zeros(1, 1024, dtype=torch.bfloat16), torch.tensor([0]), temperature=1.0)
    assert logprob.dtype == torch.float32
    assert logprob.item() == pytest.approx(-math.log(1024), abs=1e-5)
