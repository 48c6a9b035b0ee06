"""Metrics and log of rollouts that sessions played: several rows, tool calls, lost ones."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.telemetry.completions_table import completions_table
from services.trainer.telemetry.per_token_log import rollout_rows
from services.trainer.telemetry.step_metrics import TrainedGroup, num_seen_tokens, rollout_metrics
from shared.arrays import pack_ids
from shared.messages import PlayedEnvironment, RewardOutcome, Rollout, Stamp
from shared.run_options.run_config import RunConfig
from tests.groups import rollout, row, scored_group

pytestmark = pytest.mark.unit

CONFIG = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"])


def agents(*rollouts: Rollout) -> TrainedGroup:
    """Return a group of rollouts that a session played."""
    group = scored_group("00000007", rewards=[0.0] * len(rollouts))
    prompt = msgspec.structs.replace(group.prompt, prompt_ids=b"")
    played = msgspec.structs.replace(group, prompt=prompt, rollouts=rollouts)
    rewards_G = np.array([np.nan if rollout.lost else 1.0 for rollout in rollouts])
    return TrainedGroup(WaitingGroup(7, played, 0), rewards_G, np.zeros(len(rollouts)), has_signal=True)


FORKED = msgspec.structs.replace(
    rollout("00000007", 0, reward=1.0),
    rows=(row((5, 6, 8, 3, 9), (0, 0, 1, 0, 1), 2), row((5, 6, 8, 4, 10, 11), (0, 0, 0, 0, 1, 1), 3)),
    completion=[{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": math.nan}}}]}],
    tool_calls=3,
    tool_failures=1,
)
LOST = msgspec.structs.replace(
    rollout("00000007", 1),
    rows=(),
    lost="a tool hung",
    tool_calls=1,
    rewards=(RewardOutcome("exact", "lost", None, 1.0, "a tool hung"),),
)
CUT = msgspec.structs.replace(rollout("00000007", 2, reward=1.0), rows=(row((5, 8), (0, 1), finish_reason="length"),))


def test_metrics_of_completions_are_over_whole_rollouts_and_those_of_tools_as_in_trl() -> None:
    metrics = rollout_metrics([agents(FORKED, LOST, CUT)], policy_version=3, config=CONFIG)
    lengths = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("completions/")}
    assert lengths == {
        "mean_length": 2.5,
        "min_length": 1.0,
        "max_length": 4.0,
        "clipped_ratio": 0.5,
        "mean_terminated_length": 4.0,
        "min_terminated_length": 4.0,
        "max_terminated_length": 4.0,
    }
    assert {name: metrics[name] for name in metrics if name.partition("/")[0] in ("tools", "rollouts")} == {
        "tools/call_frequency": pytest.approx(4 / 3),
        "tools/failure_frequency": 0.25,
        "rollouts/lost": 1.0,
        "rollouts/rows_mean": 1.5,
    }
    assert metrics["rewards/exact/failed_ratio"] == pytest.approx(1 / 3)
    assert num_seen_tokens([agents(FORKED, LOST, CUT)]) == (2 + 4) + (1 + 1)


def test_without_a_tool_call_none_failed_and_plain_runs_do_not_speak_of_tools() -> None:
    metrics = rollout_metrics([agents(CUT)], policy_version=0, config=CONFIG)
    assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (0.0, 0.0)
    group = agents(CUT)
    prompt = msgspec.structs.replace(group.waiting.group.prompt, prompt_ids=pack_ids([5]))
    plain = msgspec.structs.replace(group.waiting.group, prompt=prompt)
    group = dataclasses.replace(group, waiting=WaitingGroup(7, plain, 0))
    metrics = rollout_metrics([group], policy_version=0, config=CONFIG)
    assert not any(name.startswith(("tools/", "rollouts/")) for name in metrics)


def test_rollouts_that_are_all_lost_have_no_length() -> None:
    metrics = rollout_metrics([agents(LOST)], policy_version=0, config=CONFIG)
    assert math.isnan(metrics["completions/mean_length"])
    assert math.isnan(metrics["completions/max_terminated_length"])
    assert metrics["rollouts/lost"] == 1.0


def test_the_log_counts_the_tokens_of_all_rows_and_says_where_each_ends() -> None:
    values = {"trainer_logprobs": [-1.0, -2.0], "importance_ratio": [1.0, 2.0], "entropy": [0.5, 0.25]}
    arrays: list[Any] = [SimpleNamespace(**{name: np.array(each) for name, each in values.items()}, advantage=0.5)] * 2
    forked, lost, cut = rollout_rows(
        [agents(FORKED, LOST, CUT)],
        step=3,
        policy_version=3,
        trained=Stamp("trained", 9.0, "trainer-0"),
        per_token={"00000007-0": arrays},
    )
    assert forked["num_tokens"] == 4
    assert forked["policy_versions"] == [[2, 0, 2, 0], [3, 2, 4, 0]]
    assert forked["rows"] == [
        {"num_tokens": 2, "num_turns": 2, "finish_reason": "stop"},
        {"num_tokens": 2, "num_turns": 1, "finish_reason": "stop"},
    ]
    assert (forked["tool_calls"], forked["tool_failures"]) == (3, 1)
    (said,) = json.loads(json.dumps(forked["completion"], allow_nan=False))
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": None}}
    assert forked["per_token"] == {
        "token_ids": [8, 9, 10, 11],
        "generator_logprobs": [-0.5] * 4,
        "trainer_logprobs": [-1.0, -2.0, -1.0, -2.0],
        "importance_ratio": [1.0, 2.0, 1.0, 2.0],
        "entropy": [0.5, 0.25, 0.5, 0.25],
        "advantage": [0.5] * 4,
    }
    assert (lost["lost"], lost["num_tokens"], lost["policy_versions"], lost["finish_reason"]) == (
        "a tool hung", 0, [], None
    )  # fmt: skip
    assert cut["finish_reason"] == "length"
    assert not {"rows", "lost", "tool_calls"} & cut.keys()


def in_game(branch: int, exact: float, own: float) -> Rollout:
    environment = PlayedEnvironment("my_envs:Game", True, f" Guess {branch}.", own, {"tries": branch, "nan": math.nan})
    rewards = RewardOutcome("exact", "scored", exact, 0.5), RewardOutcome("my_envs:Game", "scored", own, 1.0)
    return msgspec.structs.replace(rollout("00000007", branch), environment=environment, rewards=rewards)


def test_the_reward_of_an_environment_is_logged_under_its_class_and_its_attributes_with_the_rollout() -> None:
    group = agents(in_game(0, 0.0, 0.25), in_game(1, 1.0, 0.75))
    metrics = rollout_metrics([group], policy_version=0, config=CONFIG)
    assert (metrics["rewards/exact/mean"], metrics["rewards/Game/mean"]) == (0.5, 0.5)
    rows = rollout_rows([group], step=1, policy_version=0, trained=Stamp("trained", 9.0, "trainer-0"), per_token=None)
    assert [row["environment"] for row in rows] == [{"tries": 0, "nan": None}, {"tries": 1, "nan": None}]
    assert [row["prompt"] for row in rows] == ["abc Guess 0.", "abc Guess 1."]
    assert rows[1]["rewards"]["my_envs:Game"]["value"] == 0.75
    table = completions_table([group], step=1)
    assert table.columns == ("step", "prompt", "completion", "exact", "Game", "advantage")


def test_rewards_of_environments_are_normalised_with_weight_1() -> None:
    config = CONFIG.model_copy(update={"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.5]})
    opposite = agents(in_game(0, 1.0, 0.0), in_game(1, 0.0, 1.0))
    # Normalised, the values are about 0.7071 and -0.7071. With weights 0.5 and 1 they do not cancel out.
    assert rollout_metrics([opposite], policy_version=0, config=config)["frac_reward_zero_std"] == 0.0
