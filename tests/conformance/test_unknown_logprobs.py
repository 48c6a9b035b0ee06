"""Tokens without a known logprob: TRL's GRPOTrainer and our core treat the other tokens in the same way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.loop.train_rows import make_minibatch, step_totals
from services.trainer.policy.policy_core import PolicyCore
from tests.conformance import oracle
from tests.conformance.batches import (
    REWARD_NAMES,
    PromptGroup,
    options,
    random_groups,
    sampled_by_another_policy,
    train_rows,
)
from tests.conformance.conftest import Models
from tests.conformance.test_loss_grid import gradient_difference, relative
from tests.conformance.test_rollout_metrics import as_trained
from tests.trainer.cores import make_config, make_core

TOLERANCE = 1e-5
SAMPLING_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)
CASES: dict[str, dict[str, Any]] = {
    "token_truncate": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.3},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.3},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence_mask": {"vllm_importance_sampling_mode": "sequence_mask"},
    "off_policy_mask": {"off_policy_mask_threshold": 0.02},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
}


def with_unknown_logprobs(groups: list[PromptGroup]) -> list[PromptGroup]:
    """Return the groups in which the first sampled token of every other completion has no logprob."""
    return [
        replace(
            group,
            completions=tuple(
                replace(each, generator_logprobs=(float("nan"), *each.generator_logprobs[1:]))
                if branch % 2 == 0
                else each
                for branch, each in enumerate(group.completions)
            ),
        )
        for group in groups
    ]


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_metrics_are_trls(
    name: str, models: Models, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    both: dict[str, Any] = options(**CASES[name])
    mine: dict[str, Any] = {"reward_funcs": list(REWARD_NAMES), "reward_weights": [1.0, 0.5]}
    core, config = make_core(models.start, **both, **mine), make_config(models.start, **both, **mine)
    drawn = random_groups(3, 4, seed=17)
    scores = core.score(train_rows(drawn, config))
    logprobs = [each.trainer_logprobs for each in scores]
    groups = with_unknown_logprobs(sampled_by_another_policy(drawn, logprobs, spread=0.2, seed=8))

    theirs = oracle.make_oracle(models.start, groups, tmp_path, reward_weights=[1.0, 0.5], **both)
    inputs = oracle.score(theirs, groups)
    inputs["advantages"] = inputs["advantages"] + 0.5  # otherwise the terms of the loss would cancel
    loss, gradients = oracle.loss_and_gradients(theirs, inputs)

    minibatch = make_minibatch(as_trained(groups, config), config)
    rows = [replace(row, advantage=row.advantage + 0.5) for row in minibatch.rows]
    metrics = core.accumulate(rows, totals=step_totals([minibatch])[0]).token_stats.metrics()
    of_core = {weight: parameter.grad for weight, parameter in core.lm.named_parameters()}
    differences = {
        "loss": relative(metrics["loss"], loss),
        "gradient": gradient_difference(of_core, gradients),
        **{each: relative(metrics[each], oracle.metrics(theirs)[each], at_least=0.1) for each in SAMPLING_METRICS},
    }
    tell(f"unknown logprobs, {name}: loss {differences['loss']:.1e}, gradient {differences['gradient']:.1e}")
    assert max(differences.values()) <= TOLERANCE, differences
    assert metrics["sampling/no_logprob_share"] == pytest.approx(6 / minibatch.num_tokens)


def test_plain_ppo_takes_such_a_token_as_one_both_agree_on(models: Models) -> None:
    core: PolicyCore = make_core(
        models.start, use_decoupled_loss=False, vllm_importance_sampling_correction=False, temperature=0.9
    )
    config = make_config(models.start, reward_funcs=list(REWARD_NAMES))
    rows = train_rows(random_groups(1, 4, seed=3), config)
    logprobs = [each.trainer_logprobs for each in core.score(rows)]
    agreeing = [replace(row, generator_logprobs=of_row) for row, of_row in zip(rows, logprobs, strict=True)]
    unknown = [
        replace(row, generator_logprobs=np.where(np.arange(of_row.size) == 1, np.nan, of_row).astype(np.float32))
        for row, of_row in zip(rows, logprobs, strict=True)
    ]
    expected = core.accumulate(agreeing).token_stats.metrics()
    core.discard()
    found = core.accumulate(unknown, per_token=True)
    assert found.token_stats.metrics()["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found.token_stats.metrics()["mismatch_kl/k3"] == pytest.approx(0.0, abs=1e-9)
    assert np.isnan(found.per_token[0].importance_ratio).tolist() == [
        place == 1 for place in range(rows[0].num_sampled)
    ]
