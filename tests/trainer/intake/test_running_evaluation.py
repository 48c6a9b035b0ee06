"""The metrics of an evaluation of which some rollouts were lost."""

import math

import msgspec
import pytest

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint, BestRule
from services.trainer.intake.running_evaluation import RunningEvaluation
from shared.messages import RewardOutcome
from shared.run_options.run_config import RunConfig
from tests.groups import scored_group
from tests.trainer.intake.batch_rig import lost

pytestmark = pytest.mark.unit


def test_a_long_batch_counts_as_a_fifth_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    evaluation = RunningEvaluation(step=7, num_prompts=2, num_skipped=0, began_at=0.0)

    def is_given_up(*, after_s: float) -> bool:
        now[0] += after_s
        return evaluation.is_given_up(idle_s=600)

    evaluation.see_sign()
    assert [is_given_up(after_s=720) for _ in range(5)] == [False, False, False, False, True]
    evaluation.see_sign()
    assert not is_given_up(after_s=720)
    assert [is_given_up(after_s=60) for _ in range(8)] == [*[False] * 7, True]


def test_a_group_without_a_token_names_no_version(run_config: RunConfig) -> None:
    evaluation = RunningEvaluation(step=7, num_prompts=2, num_skipped=0, began_at=0.0)
    evaluation.add(1, lost(scored_group("00000001"), 0, 1))
    assert math.isnan(evaluation.metrics(run_config)["eval_policy_version/min"])
    evaluation.add(0, lost(scored_group("00000000", policy_version=6), 0))
    metrics = evaluation.metrics(run_config)
    assert [metrics[f"eval_policy_version/{name}"] for name in ("min", "mean", "max")] == [6.0, 6.0, 6.0]
    assert (metrics["eval_reward"], metrics["eval_completions/mean_length"]) == (1.0, 2.0)


def test_a_prompt_without_a_score_is_counted_if_its_completions_should_have_had_one(run_config: RunConfig) -> None:
    evaluation = RunningEvaluation(step=7, num_prompts=3, num_skipped=0, began_at=0.0)
    evaluation.add(0, lost(scored_group("00000000"), 0))
    evaluation.add(1, lost(scored_group("00000001"), 0, 1))
    not_applicable = RewardOutcome("exact", "not_applicable", None, 1.0)
    group = scored_group("00000002")
    rollouts = tuple(msgspec.structs.replace(rollout, rewards=(not_applicable,)) for rollout in group.rollouts)
    evaluation.add(2, msgspec.structs.replace(group, rollouts=rollouts))
    metrics = evaluation.metrics(run_config)
    assert [metrics[f"eval_groups/{name}"] for name in ("done", "missing", "unscored")] == [3.0, 0.0, 1.0]
    strict, tolerant = (BestCheckpoint(BestRule("eval_reward", max_unscored=share)) for share in (0.25, 0.5))
    assert (strict.num_missing(metrics), tolerant.num_missing(metrics)) == (1, 0)
