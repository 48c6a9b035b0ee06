"""The fused projection against a plain projection, which computes all logits at once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from services.trainer.policy import linear_logprobs as module
from services.trainer.policy.linear_logprobs import HeadTransform, linear_logprobs

PLAIN = HeadTransform()
NUM_POSITIONS, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.fixture(autouse=True)
def _tiles_smaller_than_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.TILE_ROWS, "cpu", 3)
    monkeypatch.setitem(module.TILE_VOCABULARY, "cpu", 4)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_MH = torch.randn(NUM_POSITIONS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    bias_V = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    targets_M = torch.randint(0, VOCABULARY, (NUM_POSITIONS,), generator=generator)
    return hidden_MH.requires_grad_(), weight_VH.requires_grad_(), bias_V.requires_grad_(), targets_M


def written_out(
    hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_M: Tensor, transform: HeadTransform
) -> tuple[Tensor, Tensor]:
    logits_MV = hidden_MH @ weight_VH.t()
    if bias_V is not None:
        logits_MV = logits_MV + bias_V
    logits_MV = logits_MV * transform.scale
    if transform.softcap is not None:
        logits_MV = transform.softcap * torch.tanh(logits_MV / transform.softcap)
    logprobs_MV = (logits_MV / transform.temperature).log_softmax(-1)
    return logprobs_MV.gather(1, targets_M[:, None])[:, 0], -(logprobs_MV.exp() * logprobs_MV).sum(-1)


TRANSFORMS = [
    PLAIN,
    HeadTransform(temperature=0.6),
    HeadTransform(scale=1.7, softcap=2.0, temperature=0.6),
    HeadTransform(scale=0.0),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logprobs_entropies_and_both_gradients_equal_a_plain_log_softmax(
    transform: HeadTransform, has_bias: bool
) -> None:
    hidden_MH, weight_VH, bias_V, targets_M = inputs()
    leaves = [hidden_MH, weight_VH] + ([bias_V] if has_bias else [])
    weigh_M = torch.arange(1.0, 8.0, dtype=torch.float64)
    results: list[tuple[Tensor, Tensor, tuple[Tensor, ...]]] = []
    for fused in (True, False):
        bias = bias_V if has_bias else None
        if fused:
            logprobs_M, entropies_M = linear_logprobs(
                hidden_MH, weight_VH, targets_M, bias_V=bias, transform=transform, with_entropy_grad=True
            )
        else:
            logprobs_M, entropies_M = written_out(hidden_MH, weight_VH, bias, targets_M, transform)
        value = (weigh_M * logprobs_M).sum() + (weigh_M.flip(0) * entropies_M).sum()
        results.append((logprobs_M.detach(), entropies_M.detach(), torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_the_gradient_is_the_slope_of_the_function() -> None:
    hidden_MH, weight_VH, bias_V, targets_M = inputs()
    transform = HeadTransform(scale=1.3, softcap=3.0, temperature=0.8)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, targets_M, bias_V=bias, transform=transform, with_entropy_grad=True)

    assert torch.autograd.gradcheck(function, (hidden_MH, weight_VH, bias_V))


def test_a_distribution_known_by_hand() -> None:
    # Probabilities 1/2, 1/4, 1/4; at temperature 1/2 they are squared: 1/4, 1/16, 1/16 of 3/8.
    hidden_MH = torch.ones(1, 1)
    weight_VH = torch.tensor([[0.5], [0.25], [0.25]]).log() + 3.0
    logprobs_M, entropies_M = linear_logprobs(hidden_MH, weight_VH, torch.tensor([1]), transform=PLAIN)
    assert logprobs_M.item() == pytest.approx(-math.log(4))
    assert entropies_M.item() == pytest.approx(1.5 * math.log(2))
    colder = HeadTransform(temperature=0.5)
    logprobs_M, _ = linear_logprobs(hidden_MH, weight_VH, torch.tensor([0]), transform=colder)
    assert logprobs_M.item() == pytest.approx(math.log(2 / 3), abs=1e-6)


def test_a_token_that_cannot_be_sampled_adds_nothing_to_the_entropy() -> None:
    bias_V = torch.tensor([0.0, 0.0, -math.inf, -math.inf, -math.inf, -math.inf, -math.inf, -math.inf])
    logprobs_M, entropies_M = linear_logprobs(
        torch.zeros(1, 2), torch.zeros(8, 2), torch.tensor([1]), bias_V=bias_V, transform=PLAIN
    )
    assert logprobs_M.item() == pytest.approx(-math.log(2))
    assert entropies_M.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["bias", "weight"])
def test_a_first_tile_of_tokens_that_cannot_be_sampled_changes_nothing(
    where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 tokens in tiles of 16. No token of the first tile can be sampled; all others are equally likely."""
    monkeypatch.setitem(module.TILE_VOCABULARY, "cpu", 16)
    hidden_MH = torch.ones(2, 1, dtype=dtype, requires_grad=True)
    weight_VH = torch.zeros(48, 1, dtype=dtype)
    bias_V = torch.zeros(48, dtype=dtype)
    (bias_V if where == "bias" else weight_VH)[:16] = -math.inf
    logprobs_M, entropies_M = linear_logprobs(
        hidden_MH, weight_VH, torch.tensor([16, 47]), bias_V=bias_V, transform=PLAIN, with_entropy_grad=True
    )
    assert logprobs_M.tolist() == pytest.approx([-math.log(32)] * 2)
    assert entropies_M.tolist() == pytest.approx([math.log(32)] * 2)
    if where == "bias":
        (logprobs_M + 100 * entropies_M).sum().backward()  # type: ignore[no-untyped-call]
        assert hidden_MH.grad is not None
        assert hidden_MH.grad.flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outside", [-1, -7, VOCABULARY, 10**6])
def test_a_target_outside_the_vocabulary_is_refused(outside: int, dtype: torch.dtype) -> None:
    hidden_MH, weight_VH, _, targets_M = inputs(dtype)
    targets_M[3] = outside
    with pytest.raises(ValueError, match=f"token id {outside} is outside the model's vocabulary of 11 tokens"):
        linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN)


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    # 1000 and -1000 in different tiles, in both orders.
    for sign in (1.0, -1.0):
        weight_VH = torch.linspace(-1000 * sign, 1000 * sign, VOCABULARY)[:, None]
        top = VOCABULARY - 1 if sign > 0 else 0
        logprobs_M, entropies_M = linear_logprobs(torch.ones(2, 1), weight_VH, torch.tensor([top, 5]), transform=PLAIN)
        assert logprobs_M.tolist() == pytest.approx([0.0, -1000.0])
        assert entropies_M.tolist() == pytest.approx([0.0, 0.0])


def test_entropies_carry_no_gradient_unless_asked_for() -> None:
    hidden_MH, weight_VH, _, targets_M = inputs()
    logprobs_M, entropies_M = linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN)
    assert logprobs_M.requires_grad
    assert not entropies_M.requires_grad


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden_MH, weight_VH, _, targets_M = inputs()
    weight_VH = weight_VH.detach()
    logprobs_M, _ = linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN)
    logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden_MH.grad is not None
    assert weight_VH.grad is None


def test_bfloat16_factors_are_added_up_in_float32() -> None:
    # 1024 equal logits: log 1024 = 6.93147; in bfloat16 it would come out as 6.9375.
    hidden_MH = torch.zeros(1, 4, dtype=torch.bfloat16)
    logprobs_M, _ = linear_logprobs(hidden_MH, torch.zeros(1024, 4), torch.tensor([0]), transform=PLAIN)
    assert logprobs_M.dtype == torch.float32
    assert logprobs_M.item() == pytest.approx(-math.log(1024), abs=1e-5)


def test_the_compute_dtype_rounds_the_factors_and_nothing_else() -> None:
    hidden_MH, weight_VH, _, targets_M = inputs(torch.float32)
    logprobs_M, _ = linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN, compute_dtype=torch.bfloat16)
    rounded = [tensor.detach().bfloat16().double() for tensor in (hidden_MH, weight_VH)]
    expected_M, _ = written_out(rounded[0], rounded[1], None, targets_M, PLAIN)
    torch.testing.assert_close(logprobs_M.detach().double(), expected_M, rtol=1e-6, atol=1e-6)
    exact_M, _ = written_out(hidden_MH.double(), weight_VH.double(), None, targets_M, PLAIN)
    assert float((exact_M.detach() - expected_M).abs().max()) > 1e-4  # the rounding can be seen


def test_the_same_inputs_give_the_same_bits() -> None:
    hidden_MH, weight_VH, _, targets_M = inputs(torch.float32)
    runs: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        logprobs_M, entropies_M = linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN)
        runs.append((logprobs_M, entropies_M, *torch.autograd.grad(logprobs_M.sum(), [hidden_MH, weight_VH])))
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    hidden_MH, weight_VH, _, targets_M = inputs()
    with torch.profiler.profile(record_shapes=True) as profile:
        logprobs_M, _ = linear_logprobs(hidden_MH, weight_VH, targets_M, transform=PLAIN)
        logprobs_M.sum().backward()  # type: ignore[no-untyped-call]
    events: Any = profile.events()
    shapes = {tuple(shape) for event in events for shape in event.input_shapes}
    assert (3, 4) in shapes  # a tile
    assert not {shape for shape in shapes if len(shape) == 2 and NUM_POSITIONS in shape and VOCABULARY in shape}


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        (Qwen2Config(), 1.0, None),
        (Gemma2Config(final_logit_softcapping=30.0), 1.0, 30.0),
        (CohereConfig(logit_scale=0.0625), 0.0625, None),
        (CohereConfig(logit_scale=0.0), 0.0, None),
        (GraniteConfig(logits_scaling=8.0), 0.125, None),
        (HyperCLOVAXConfig(logits_scaling=8.0), 8.0, None),
        (FalconH1Config(lm_head_multiplier=0.5), 0.5, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else str(value),
)
def test_changes_of_logits_are_read_from_the_models_config(
    config: PreTrainedConfig, scale: float, softcap: float | None
) -> None:
    transform = HeadTransform.of_model(config, temperature=0.7)
    assert transform == HeadTransform(scale=scale, softcap=softcap, temperature=0.7)
