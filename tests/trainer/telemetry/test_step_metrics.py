"""The metrics of a batch's rollouts have TRL's values, and every rollout is logged with everything known about it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.telemetry.per_token_log import rollout_rows, sampled_rollouts
from services.trainer.telemetry.step_metrics import (
    WINDOW_S,
    RecentRate,
    TrainedGroup,
    group_metrics,
    metric_names,
    num_seen_tokens,
    rollout_metrics,
)
from shared.messages import RewardOutcome, Rollout, Stamp
from shared.run_options.run_config import RunConfig
from tests.groups import rollout, scored_group, with_row

pytestmark = pytest.mark.unit

CONFIG = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"])
Said = dict[str, float | str | None]


def trained(
    number: int,
    said: Sequence[Said],
    *,
    weights: Sequence[float] = (1.0, 1.0),
    lengths: Sequence[int] | None = None,
    truncated: Sequence[int] = (),
    policy_version: int = 0,
) -> TrainedGroup:
    """Return a group with these values of the reward functions; a string is the outcome of a failure."""
    group_id = f"{number:08d}"
    group = scored_group(group_id, rewards=[0.0] * len(said), policy_version=policy_version)
    rollouts: list[Rollout] = []
    rewards: list[float] = []
    for branch, outcomes in enumerate(said):
        length = 2 if lengths is None else lengths[branch]
        made = rollout(group_id, branch, completion_ids=[9] * length, policy_version=policy_version)
        turn = msgspec.structs.replace(made.rows[0].turns[0], finish_reason="length" if branch in truncated else "stop")
        rollouts.append(
            msgspec.structs.replace(
                with_row(made, turns=(turn,)), rewards=tuple(map(outcome, outcomes, outcomes.values(), weights))
            )
        )
        numbers = [value for value in outcomes.values() if isinstance(value, float)]
        failed = any(isinstance(value, str) for value in outcomes.values())
        rewards.append(float("nan") if failed or not numbers else sum(numbers))
    return TrainedGroup(
        waiting=WaitingGroup(number, msgspec.structs.replace(group, rollouts=tuple(rollouts)), policy_version),
        rewards_G=np.array(rewards),
        advantages_G=np.arange(len(said), dtype=np.float64),
        has_signal=True,
    )


def outcome(name: str, value: float | str | None, weight: float) -> RewardOutcome:
    if value is None:
        return RewardOutcome(name, "not_applicable", None, weight)
    if isinstance(value, str):
        return RewardOutcome(name, "timeout", None, weight, detail=value)
    return RewardOutcome(name, "scored", value, weight)


def metrics(*groups: TrainedGroup, policy_version: int = 0, **changes: Any) -> dict[str, float]:
    return rollout_metrics(groups, policy_version=policy_version, config=CONFIG.model_copy(update=changes))


def test_environments_whose_classes_share_a_name_have_the_same_metrics_in_every_batch() -> None:
    played = {"chess": "chess:Environment", "go": "go:Environment"}
    of_chess = trained(0, [{"chess:Environment": 1.0}, {"chess:Environment": 0.0}])
    of_go = trained(1, [{"go:Environment": 0.25}, {"go:Environment": 0.25}])
    means = {"rewards/chess.Environment/mean": 0.5, "rewards/go.Environment/mean": 0.25}
    found: dict[str, float] = {}
    for groups in ((of_chess,), (of_go,), (of_chess, of_go)):
        found |= metrics(*groups, reward_funcs=[], environment_factory=played)
    assert {name: found[name] for name in found if name.startswith("rewards/") and name.endswith("/mean")} == means


def test_groups_in_different_environments_have_their_own_rewards() -> None:
    of_chess: list[Said] = [{"exact": 1.0, "envs:Chess": 0.25}, {"exact": 0.0, "envs:Chess": 0.75}]
    of_go: list[Said] = [{"exact": 1.0, "envs:Go": 1.0}, {"exact": 0.0, "envs:Go": "late"}]
    found = metrics(trained(0, of_chess), trained(1, of_go), trained(2, exact(0.5, 0.5)))
    assert found["rewards/exact/mean"] == 0.5
    assert found["rewards/Chess/mean"] == 0.5
    assert found["rewards/Go/mean"] == 1.0
    assert found["rewards/Chess/failed_ratio"] == 0.0
    assert found["rewards/Go/failed_ratio"] == 0.5


def exact(*values: float | None) -> list[Said]:
    return [{"exact": value} for value in values]


def test_lengths_are_of_all_completions_and_of_completions_that_ended_by_themselves() -> None:
    found = metrics(
        trained(0, exact(0.0, 1.0), lengths=[4, 10], truncated=[1]), trained(1, exact(0.0, 1.0), lengths=[2, 6])
    )
    assert {name: value for name, value in found.items() if name.startswith("completions/")} == {
        "completions/mean_length": 5.5,
        "completions/min_length": 2.0,
        "completions/max_length": 10.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 4.0,
        "completions/min_terminated_length": 2.0,
        "completions/max_terminated_length": 6.0,
    }


def test_terminated_lengths_are_zero_if_nothing_ended_by_itself_as_trl_has_it() -> None:
    found = metrics(trained(0, exact(0.0, 1.0), truncated=[0, 1]))
    assert found["completions/clipped_ratio"] == 1.0
    assert found["completions/mean_terminated_length"] == 0.0
    assert found["completions/max_terminated_length"] == 0.0


def test_reward_std_is_over_the_batch_and_not_the_mean_over_groups() -> None:
    found = metrics(trained(0, exact(0.0, 0.0)), trained(1, exact(1.0, 1.0)))
    assert found["reward"] == 0.5
    assert found["reward_std"] == pytest.approx((4 * 0.25 / 3) ** 0.5)  # within each group it is 0
    assert found["frac_reward_zero_std"] == 1.0


def test_a_failed_reward_is_in_no_mean_and_counted() -> None:
    said: list[Said] = [
        {"exact": 1.0, "style": 0.5},
        {"exact": 0.0, "style": "too slow"},
        {"exact": 1.0, "style": None},
    ]
    found = metrics(trained(0, said))
    assert found["rewards/exact/mean"] == pytest.approx(2 / 3)
    assert found["rewards/exact/std"] == pytest.approx((1 / 3) ** 0.5)  # (2 (1/3)^2 + (2/3)^2) / 2
    assert found["rewards/style/mean"] == 0.5
    assert np.isnan(found["rewards/style/std"]), "one value has no std"
    assert found["rewards/style/failed_ratio"] == pytest.approx(1 / 3)
    assert found["rewards/exact/failed_ratio"] == 0.0
    assert found["reward"] == pytest.approx((1.5 + 1.0) / 2)
    assert found["reward_std"] == pytest.approx((2 * 0.25**2) ** 0.5)


def with_outcomes(group: TrainedGroup, **changes: Any) -> TrainedGroup:
    """Return the group with these changes in the outcome of every function."""
    rollouts = tuple(
        msgspec.structs.replace(it, rewards=tuple(msgspec.structs.replace(said, **changes) for said in it.rewards))
        for it in group.waiting.group.rollouts
    )
    scored = msgspec.structs.replace(group.waiting.group, rollouts=rollouts)
    return dataclasses.replace(group, waiting=WaitingGroup(group.waiting.number, scored, 0))


def test_latency_is_the_mean_over_completions_of_their_groups_call() -> None:
    slow = with_outcomes(trained(0, exact(1.0, 0.0)), latency_s=3.0)
    fast = with_outcomes(trained(1, exact(1.0, 0.0)), latency_s=1.0)
    assert metrics(slow, fast)["rewards/exact/latency_s"] == 2.0


def test_metrics_that_functions_log_are_means_under_their_own_names_unless_the_name_is_ours() -> None:
    first = with_outcomes(trained(0, exact(1.0, 0.0)), metrics={"parsed": 1.0, "step": 99.0, "reward": 7.0})
    second = with_outcomes(trained(1, exact(1.0, 0.0)), metrics={"parsed": 0.5})
    found = metrics(first, second, trained(2, exact(1.0, 0.0)))
    assert found["parsed"] == 0.75
    assert found["reward"] == 0.5
    assert "step" not in found


def test_the_rollout_log_has_the_gold_answer_and_what_functions_logged() -> None:
    group = with_outcomes(trained(0, exact(1.0, 0.0)), metrics={"parsed": 1.0}, extra={"half": 2.5})
    prompt = msgspec.structs.replace(group.waiting.group.prompt, columns={"answer": "5", "other": 1})
    scored = msgspec.structs.replace(group.waiting.group, prompt=prompt)
    group = dataclasses.replace(group, waiting=WaitingGroup(0, scored, 0))
    row, _ = rollout_rows([group], step=1, policy_version=0, trained=Stamp("trained", 0.0, "trainer"))
    assert row["reference"] == "5"
    assert (row["rewards"]["exact"]["metrics"], row["rewards"]["exact"]["extra"]) == ({"parsed": 1.0}, {"half": 2.5})
    (plain, _) = rollout_rows(
        [trained(1, exact(1.0, 0.0))], step=1, policy_version=0, trained=Stamp("trained", 0.0, "trainer")
    )
    assert "metrics" not in plain["rewards"]["exact"]


def test_a_function_that_applied_to_nothing_has_its_metrics_without_a_number() -> None:
    found = metrics(trained(0, [{"exact": 1.0, "style": None}, {"exact": 0.0, "style": None}]))
    assert np.isnan(found["rewards/style/mean"])
    assert np.isnan(found["rewards/style/std"])


@pytest.mark.parametrize(
    ("scale_rewards", "share"), [("group", 0.5), ("none", 0.5), ("batch", 0.0)], ids=["group", "none", "batch"]
)
def test_the_share_without_std_is_of_the_std_that_divides(scale_rewards: str, share: float) -> None:
    found = metrics(trained(0, exact(1.0, 1.0)), trained(1, exact(0.0, 1.0)), scale_rewards=scale_rewards)
    assert found["frac_reward_zero_std"] == share


def test_a_completion_without_a_sibling_counts_as_one_without_std() -> None:
    assert metrics(trained(0, exact(1.0)), trained(1, exact(0.0)))["frac_reward_zero_std"] == 1.0


def test_with_one_reward_for_all_nothing_has_a_std_however_it_is_scaled() -> None:
    groups = trained(0, exact(0.1, 0.1)), trained(1, exact(0.1, 0.1))
    assert metrics(*groups, scale_rewards="batch")["frac_reward_zero_std"] == 1.0
    normalised = metrics(*groups, multi_objective_aggregation="normalize_then_sum")
    assert normalised["frac_reward_zero_std"] == 1.0


def test_rewards_that_cancel_out_have_a_std_when_each_is_normalised_first() -> None:
    """The sums are equal: 0 + 1 and 1 + 0. The sums of the normalised rewards, with weights 2 and 1, are not."""
    groups = trained(0, [{"exact": 0.0, "style": 1.0}, {"exact": 1.0, "style": 0.0}], weights=[2.0, 1.0])
    config: dict[str, Any] = {"reward_funcs": ["exact", "style"], "reward_weights": [2.0, 1.0]}
    assert metrics(groups, **config)["frac_reward_zero_std"] == 1.0
    found = metrics(groups, multi_objective_aggregation="normalize_then_sum", **config)
    assert found["frac_reward_zero_std"] == 0.0


def test_staleness_is_counted_from_the_oldest_token_of_each_group() -> None:
    groups = [trained(0, exact(0.0, 1.0), policy_version=5), trained(1, exact(0.0, 1.0), policy_version=2)]
    found = metrics(*groups, policy_version=5)
    assert (found["staleness/min"], found["staleness/mean"], found["staleness/max"]) == (0.0, 1.5, 3.0)


def test_tokens_are_counted_with_their_prompt_for_each_completion() -> None:
    """Prompts of three tokens; completions of 4 and 10."""
    assert num_seen_tokens([trained(0, exact(0.0, 1.0), lengths=[4, 10])]) == 3 + 4 + 3 + 10


def test_groups_are_counted_by_what_became_of_them() -> None:
    ledger = Ledger(admitted=10)
    ledger.record_trained(0)
    ledger.record_dropped(1, "stale")
    ledger.record_dropped(2, "stale")
    ledger.record_dropped(3, "zero_std")
    assert group_metrics(ledger) == {
        "groups/admitted": 10.0,
        "groups/trained": 1.0,
        "groups/dropped": 3.0,
        "groups/dropped/stale": 2.0,
        "groups/dropped/zero_std": 1.0,
    }


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        (["accuracy_reward"], ["accuracy_reward"]),
        (["my_rewards:length", "exact"], ["length", "exact"]),
        (["my.rewards:Length.score"], ["score"]),
        (["mine:length", "theirs:length", "mine:style"], ["mine.length", "theirs.length", "style"]),
        (["org/Reward-V2-0.6B", "org/other@v1.0", "/models/rm/"], ["Reward-V2-0.6B", "other", "rm"]),
        (["a/rm@v1", "b/rm", "/models/rm"], ["a.rm.v1", "b.rm", "models.rm"]),
    ],
)
def test_a_reward_function_is_called_what_trl_calls_it_unless_two_share_a_name(
    functions: list[str], names: list[str]
) -> None:
    assert list(metric_names(functions).values()) == names


class Arrays:
    """A core's arrays for a rollout of two tokens."""

    trainer_logprobs = np.array([-0.123456789, -12.3456789], dtype=np.float32)
    importance_ratio = np.array([1.45671, np.inf], dtype=np.float32)
    entropy = np.array([0.000123456, 2.0], dtype=np.float32)
    advantage = np.array([1.0, -0.5], dtype=np.float32)


def rows(group: TrainedGroup, **changes: Any) -> list[dict[str, Any]]:
    return rollout_rows([group], step=3, policy_version=2, trained=Stamp("trained", 9.0, "trainer-0"), **changes)


def test_a_row_of_the_rollout_log_says_what_was_written_what_it_got_and_by_which_policy() -> None:
    group = trained(7, [{"exact": 1.0, "style": "too slow"}, {"exact": 0.5, "style": 0.25}], policy_version=1)
    first, second = rows(group)
    assert (first["step"], first["group_id"], first["branch"]) == (3, "00000007", 0)
    assert (first["prompt"], first["completion"], first["num_tokens"]) == ("abc", "42", 2)
    assert first["reward"] is None
    assert first["rewards"]["style"] == {
        "outcome": "timeout", "value": None, "detail": "too slow", "version": "",
    }  # fmt: skip
    assert (second["reward"], second["advantage"]) == (0.75, 1.0)
    assert second["policy_versions"] == [[1, 0, 2, 0]]
    assert second["staleness"] == 1
    assert second["stamps"][-1] == ["trained", 9.0, "trainer-0"]
    assert "per_token" not in first


def test_a_row_says_which_version_of_a_function_spoke_and_what_its_value_was_made_of() -> None:
    group = trained(7, exact(1.0, 0.0))
    told = RewardOutcome("exact", "scored", 1.0, 1.0, components={"answer": 1.0, "format": 0.5}, version="3f2a")
    first, second = group.waiting.group.rollouts
    scored = msgspec.structs.replace(
        group.waiting.group, rollouts=(msgspec.structs.replace(first, rewards=(told,)), second)
    )
    row, other = rows(dataclasses.replace(group, waiting=dataclasses.replace(group.waiting, group=scored)))
    assert row["rewards"]["exact"]["version"] == "3f2a"
    assert row["rewards"]["exact"]["components"] == {"answer": 1.0, "format": 0.5}
    assert "components" not in other["rewards"]["exact"]


def test_per_token_arrays_stand_beside_the_generators_with_five_digits() -> None:
    group = trained(7, exact(1.0, 0.0))
    first, second = rows(group, per_token={"00000007-1": [Arrays()]})
    assert "per_token" not in first
    assert second["per_token"] == {
        "token_ids": [9, 9],
        "generator_logprobs": [-0.5, -0.5],
        "trainer_logprobs": [-0.12346, -12.346],
        "importance_ratio": [1.4567, None],
        "entropy": [0.00012346, 2.0],
        "advantage": [1.0, -0.5],
    }


def test_the_sample_is_the_share_asked_for_and_the_same_every_time() -> None:
    groups = [trained(number, exact(*[0.0] * 8)) for number in range(250)]
    chosen = sampled_rollouts(groups, run_id="run-a", share=0.1)
    assert 140 <= len(chosen) <= 260  # 200 of 2000, within four and a half times sqrt(180)
    assert sampled_rollouts(list(reversed(groups)), run_id="run-a", share=0.1) == chosen
    assert sampled_rollouts(groups[:10], run_id="run-a", share=0.1) <= chosen
    assert sampled_rollouts(groups, run_id="run-b", share=0.1) != chosen
    assert sampled_rollouts(groups, run_id="run-a", share=0.0) == frozenset()
    assert len(sampled_rollouts(groups, run_id="run-a", share=1.0)) == 2000


def test_bursts_are_evened_out() -> None:
    rate = RecentRate()
    rates = [rate.add(1000 * (step % 2), elapsed_s=0.5) for step in range(200)]
    assert rates[0] == 0.0
    assert all(900 <= found <= 1100 for found in rates[40:])


def test_values_older_than_the_window_are_forgotten() -> None:
    rate = RecentRate()
    rate.add(5000, elapsed_s=1.0)
    assert rate.add(0, elapsed_s=WINDOW_S - 1.0) == pytest.approx(500.0)
    assert rate.add(0, elapsed_s=1.0) == 0.0


def test_only_the_last_step_counts_if_it_is_longer_than_the_window() -> None:
    rate = RecentRate()
    rate.add(100, elapsed_s=1.0)
    assert rate.add(6000, elapsed_s=2 * WINDOW_S) == pytest.approx(300.0)
