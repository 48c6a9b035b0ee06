"""If mask_truncated_completions removes a whole group, the others have the same weights as in TRL's GRPOTrainer."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.train_rows import make_minibatch, step_totals
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
from tests.tiny_model import EOS_TOKEN_ID
from tests.trainer.cores import make_config, make_core

TOLERANCE = 1e-5
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "bnpo": {},
    "luspo": {"importance_sampling_level": "sequence"},
}


def cut_off(group: PromptGroup) -> PromptGroup:
    """Return the group with all completions truncated."""

    def without_end(token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*token_ids[:-1], 7) if token_ids[-1] == EOS_TOKEN_ID else token_ids

    return replace(
        group, completions=tuple(replace(each, token_ids=without_end(each.token_ids)) for each in group.completions)
    )


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradients_are_trls(
    loss_type: str, models: Models, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    both: dict[str, Any] = options(
        loss_type=loss_type, mask_truncated_completions=True, scale_rewards="batch", **LOSSES[loss_type]
    )
    mine: dict[str, Any] = {"reward_funcs": list(REWARD_NAMES), "reward_weights": [1.0, 0.5]}
    core, config = make_core(models.start, **both, **mine), make_config(models.start, **both, **mine)
    first, *others = random_groups(3, 4, seed=23)
    drawn = [cut_off(first), *others]
    everything = train_rows(drawn, config.model_copy(update={"mask_truncated_completions": False}))
    logprobs = [each.trainer_logprobs for each in core.score(everything)]
    groups = sampled_by_another_policy(drawn, logprobs, spread=0.1, seed=8)

    theirs = oracle.make_oracle(models.start, groups, tmp_path, reward_weights=[1.0, 0.5], **both)
    inputs = oracle.score(theirs, groups)
    inputs["advantages"] = inputs["advantages"] + 1.0  # otherwise the terms of the loss would cancel
    loss, gradients = oracle.loss_and_gradients(theirs, inputs)

    minibatch = make_minibatch(as_trained(groups, config), config)
    assert len(minibatch.rows) < 8  # no row of the first group
    rows = [replace(row, advantage=row.advantage + 1.0) for row in minibatch.rows]
    found = core.accumulate(rows, totals=step_totals([minibatch])[0]).token_stats.metrics()["loss"]
    difference = gradient_difference({name: weight.grad for name, weight in core.lm.named_parameters()}, gradients)
    tell(f"a group without rows, {loss_type}: loss {relative(found, loss):.1e}, gradient {difference:.1e}")
    assert relative(found, loss) <= TOLERANCE
    assert difference <= TOLERANCE


def test_a_step_of_only_such_groups_changes_weights_only_by_the_optimizers_momentum(models: Models) -> None:
    """As in TRL, the loss is 0: momentum and weight decay still act, and the policy version increases."""
    config = make_config(models.start, reward_funcs=list(REWARD_NAMES), mask_truncated_completions=True)
    groups = [cut_off(group) for group in random_groups(2, 4, seed=5)]
    minibatch = make_minibatch(as_trained(groups, config), config)
    assert (minibatch.rows, minibatch.num_masked_rollouts) == ((), 8)
    core = make_core(models.start, mask_truncated_completions=True)
    core.accumulate(minibatch.rows, totals=step_totals([minibatch])[0])
    stats = core.step()
    assert (stats.policy_version, stats.grad_norm) == (1, 0.0)
    metrics = stats.metrics()
    assert (metrics["loss"], metrics["num_bounded_ratios"]) == (0.0, 0.0)
    assert math.isnan(metrics["entropy"])
    assert math.isnan(metrics["sampling/no_logprob_share"])
    with pytest.raises(ValueError, match="nothing was accumulated"):
        core.step()
