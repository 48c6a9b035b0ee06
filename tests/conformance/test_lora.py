"""Our core's adapters against TRL's GRPOTrainer with a ``peft_config``: the loss, and the gradient of each adapter.

The adapters are not 0 on both sides, so that both matrices of each have a gradient. On both sides, the reference of the
KL term is the base model with adapters turned off.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.lora import adapters
from services.trainer.policy.policy_core import PolicyCore
from tests.conformance import oracle
from tests.conformance.batches import REWARD_NAMES, options, random_groups, sampled_by_another_policy, train_rows
from tests.conformance.conftest import Models
from tests.trainer.cores import make_config, make_core

TOLERANCE = 1e-5
OFFSET = 0.7
"""Added to every advantage on both sides, as in test_loss_grid.py. Otherwise the terms of the loss would cancel."""


def random_adapters(like: dict[str, Tensor], *, scale: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(tensor.shape, generator=generator) for name, tensor in like.items()}


def put(core: PolicyCore, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in adapters(core.lm).items():
            parameter.copy_(tensors[name])


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_the_loss_and_the_gradients_of_adapters_are_trls(
    loss_type: str, models: Models, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    epsilon = {"epsilon_high": 1.05} if loss_type == "cispo" else {"epsilon": 0.1, "epsilon_high": 0.15}
    # With a second iteration, TRL also computes logprobs at the beginning of the batch.
    both: dict[str, Any] = options(loss_type=loss_type, beta=0.1, num_iterations=2, **epsilon)
    mine: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 12, "max_tokens_per_microbatch": 64}
    mine |= {"reward_funcs": list(REWARD_NAMES), "reward_weights": [1.0, 0.5]}
    core, config = make_core(models.start, **both, **mine), make_config(models.start, **both, **mine)
    start = random_adapters(adapters(core.lm), scale=0.05, seed=1)
    moved = {name: start[name] + delta for name, delta in random_adapters(start, scale=0.02, seed=2).items()}

    drawn = random_groups(3, 4, seed=7)
    rows = train_rows(drawn, config)
    put(core, start)
    of_start = core.score(rows)
    groups = sampled_by_another_policy(drawn, [each.trainer_logprobs for each in of_start], spread=0.2, seed=8)

    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer_class = functools.partial(oracle.trl.GRPOTrainer, peft_config=lora)
    theirs = oracle.make_oracle(
        models.start, groups, tmp_path, trainer_class=trainer_class, reward_weights=[1.0, 0.5], **both
    )
    assert theirs.ref_model is None
    peft.set_peft_model_state_dict(theirs.model, start)
    inputs = oracle.score(theirs, groups)
    inputs["advantages"] = inputs["advantages"] + OFFSET
    peft.set_peft_model_state_dict(theirs.model, moved)
    loss, gradients = oracle.loss_and_gradients(theirs, inputs)

    put(core, moved)
    complete = [
        replace(
            row,
            advantage=row.advantage + OFFSET,
            old_logprobs=scores.trainer_logprobs,
            reference_logprobs=scores.reference_logprobs,
        )
        for row, scores in zip(train_rows(groups, config), of_start, strict=True)
    ]
    num_tokens = sum(row.num_sampled for row in complete)
    totals = StepTotals(num_rollouts=len(complete), num_tokens=float(num_tokens), num_step_tokens=num_tokens)
    metrics = core.accumulate(complete, totals=totals).token_stats.metrics()
    assert abs(metrics["loss"] - loss) <= TOLERANCE * abs(loss)
    assert metrics["kl"] == pytest.approx(oracle.metrics(theirs)["kl"], rel=TOLERANCE)
    difference = norm = 0.0
    for name, parameter in adapters(core.lm).items():
        expected = gradients[name.removesuffix("weight") + "default.weight"].double()
        assert parameter.grad is not None
        assert float(expected.abs().sum()) > 0, name
        difference += float((parameter.grad.double() - expected).square().sum())
        norm += float(expected.square().sum())
    of_gradients = (difference / norm) ** 0.5
    tell(f"LoRA {loss_type}: loss {abs(metrics['loss'] - loss) / abs(loss):.1e}, gradients {of_gradients:.1e}")
    assert of_gradients <= TOLERANCE
