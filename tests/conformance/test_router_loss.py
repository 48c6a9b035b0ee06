"""The load-balancing loss of mixture-of-experts models: our core against TRL's GRPOTrainer, and against hand-made sums.

The models have two layers of four experts, two for each token. TRL's loss is over the tokens of one padded microbatch
without the padding; ours is over the tokens of one packed pass.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, Qwen3MoeForCausalLM

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.router_loss import router_aux_loss_coef
from shared.errors import UserError
from tests.conformance import oracle
from tests.conformance.batches import REWARD_NAMES, options, random_groups, sampled_by_another_policy, train_rows
from tests.conformance.conftest import Models
from tests.conformance.test_loss_grid import gradient_difference, relative
from tests.tiny_model import make_tiny_moe, make_tiny_tokenizer
from tests.trainer.cores import GRADIENT_DESCENT, make_config, make_core, random_rows

TOLERANCE = 1e-5
OF_MODEL = 0.05
"""``router_aux_loss_coef`` in the model's config."""

OFFSET = 1.0
"""Subtracted from every advantage on both sides, as in test_loss_grid.py. Otherwise the loss's terms would cancel."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), router_aux_loss_coef=OF_MODEL)


def gradients_of(core: PolicyCore) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in core.lm.named_parameters()
    }


def totals_of(rows: list[TrainRow]) -> StepTotals:
    num_tokens = sum(row.num_sampled for row in rows)
    return StepTotals(
        num_rollouts=len(rows),
        num_tokens=float(num_tokens),
        num_step_tokens=num_tokens,
        num_pass_tokens=sum(row.token_ids.size for row in rows),
    )


@pytest.mark.parametrize(("coef", "gradient_checkpointing"), [(None, False), (0.5, False), (0.5, True), (0.0, False)])
def test_loss_gradients_and_metric_are_trls(
    coef: float | None, gradient_checkpointing: bool, moe: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    both: dict[str, Any] = options(loss_type="grpo", router_aux_loss_coef=coef)
    mine: dict[str, Any] = {"reward_funcs": list(REWARD_NAMES), "reward_weights": [1.0, 0.5]}
    mine |= {"gradient_checkpointing": gradient_checkpointing}
    core, config = make_core(moe, **both, **mine), make_config(moe, **both, **mine)
    assert core.packs
    drawn = random_groups(3, 4, seed=7)
    scores = core.score(train_rows(drawn, config))
    groups = sampled_by_another_policy(drawn, [each.trainer_logprobs for each in scores], spread=0.1, seed=8)

    theirs = oracle.make_oracle(moe, groups, tmp_path, reward_weights=[1.0, 0.5], **both)
    inputs = oracle.score(theirs, groups)
    inputs["advantages"] = inputs["advantages"] - OFFSET
    loss, gradients = oracle.loss_and_gradients(theirs, inputs)
    their_metrics = oracle.metrics(theirs)

    rows = [replace(row, advantage=row.advantage - OFFSET) for row in train_rows(groups, config)]
    stats = core.accumulate(rows, totals=totals_of(rows))
    metrics = stats.token_stats.metrics()
    assert stats.num_passes == 1
    differences = {
        "loss": relative(metrics["loss"], loss),
        "gradient": gradient_difference(gradients_of(core), gradients),
    }
    assert ("aux_loss" in metrics) == ("aux_loss" in their_metrics) == (coef != 0)
    if coef != 0:
        differences["aux_loss"] = relative(metrics["aux_loss"], their_metrics["aux_loss"])
        assert their_metrics["aux_loss"] > 2.0  # two experts a token, at the least
    tell(f"router_aux_loss_coef={coef}: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
    assert max(differences.values()) <= TOLERANCE, differences


def balance(lm: Any, rows: list[TrainRow]) -> float:
    """Return the load-balancing loss of all rows together, from the routing of each row."""
    chosen, probabilities = torch.zeros(4), torch.zeros(4)
    num_tokens = 0
    for row in rows:
        ids = torch.tensor(row.token_ids.astype("int64"))[None]
        with torch.no_grad():
            for logits in lm(input_ids=ids, output_router_logits=True).router_logits:
                of_experts = logits.softmax(-1)
                for expert in of_experts.topk(2).indices.flatten().tolist():
                    chosen[expert] += 1
                probabilities += of_experts.sum(0)
                num_tokens += of_experts.shape[0]
    return float(4 * (chosen / num_tokens * (probabilities / num_tokens)).sum())


def test_over_several_passes_it_is_their_mean_by_tokens(moe: Path) -> None:
    rows = random_rows(6, seed=4)
    lengths = [row.token_ids.size for row in rows]
    lm = Qwen3MoeForCausalLM.from_pretrained(moe)
    of_rows = [balance(lm, [row]) for row in rows]

    one_row_a_pass = make_core(moe, packing=False).accumulate(rows).token_stats.metrics()["aux_loss"]
    assert one_row_a_pass == pytest.approx(
        sum(each * length for each, length in zip(of_rows, lengths, strict=True)) / sum(lengths), rel=1e-5
    )
    whole = make_core(moe).accumulate(rows).token_stats.metrics()["aux_loss"]
    assert whole == pytest.approx(balance(lm, rows), rel=1e-5)
    assert abs(whole - one_row_a_pass) > 1e-3  # the mean of products is not the product of means


def test_it_is_learnt_from_rows_without_advantage_and_not_if_it_is_off(moe: Path) -> None:
    rows = [replace(row, advantage=0.0) for row in random_rows(4, seed=2)]
    on, off = make_core(moe, **GRADIENT_DESCENT), make_core(moe, router_aux_loss_coef=0.0, **GRADIENT_DESCENT)
    for core in (on, off):
        core.accumulate(rows)
    assert on.step().grad_norm > 1e-4
    assert off.step().grad_norm == 0


def test_a_model_without_experts_has_no_such_loss_and_a_coefficient_for_one_is_refused(models: Models) -> None:
    assert "aux_loss" not in make_core(models.start).accumulate(random_rows(2)).token_stats.metrics()
    make_core(models.start, router_aux_loss_coef=0.0)
    with pytest.raises(UserError, match="Qwen3ForCausalLM does not return its router's logits") as caught:
        make_core(models.start, router_aux_loss_coef=0.01)
    assert caught.value.field == "router_aux_loss_coef"


def make_granite(path: Path, *, num_local_experts: int) -> Path:
    """Write a GraniteMoe, whose config has another name for the number of experts."""
    config = GraniteMoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=num_local_experts,
        num_experts_per_tok=2,
        router_aux_loss_coef=OF_MODEL,
        max_position_embeddings=128,
    )
    GraniteMoeForCausalLM(config).save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def test_experts_are_counted_under_both_names_that_configs_have_for_them(tmp_path: Path) -> None:
    rows = random_rows(3, seed=4)
    model = make_granite(tmp_path, num_local_experts=4)
    lm = GraniteMoeForCausalLM.from_pretrained(model)
    assert make_core(model).accumulate(rows).token_stats.metrics()["aux_loss"] == pytest.approx(
        balance(lm, rows), rel=1e-5
    )


def test_a_dense_member_of_a_family_with_experts_has_no_such_loss(moe: Path) -> None:
    lm = Qwen3MoeForCausalLM.from_pretrained(moe)
    config = make_config(moe)
    assert router_aux_loss_coef(lm, config) == OF_MODEL
    lm.config.num_experts = 0
    assert router_aux_loss_coef(lm, config) == 0.0
