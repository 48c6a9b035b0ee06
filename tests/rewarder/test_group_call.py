"""What reward functions are called with, and the outcomes of the rollouts that they are not called with."""

from typing import Any

import msgspec
import pytest

from services.rewarder.group_call import call_for, with_rewards
from services.rewarder.reward_call import RewardCall, own_copy, text_of
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.messages import CompletedGroup, PlayedEnvironment, RewardOutcome, Rollout, decode_scored_group, encode
from shared.run_options.run_config import RunConfig
from shared.user_code.error_text import MAX_DETAIL_CHARS
from tests.groups import completed_group, rollout, row

pytestmark = pytest.mark.unit

CONFIG = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact", "brief"], reward_weights=[2.0, 0.5])
TALK = [{"role": "user", "content": "6*7?"}]
SAID: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "multiply", "arguments": "{}"}}]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]


def group_of(*rollouts: Rollout, prompt: Any = "abc") -> CompletedGroup:
    group = completed_group(num_generations=len(rollouts))
    return msgspec.structs.replace(
        group, rollouts=rollouts, prompt=msgspec.structs.replace(group.prompt, prompt=prompt)
    )


def called(group: CompletedGroup) -> RewardCall:
    return call_for(group, state=TrainerState(), max_completion_length=8)


def test_a_completion_of_messages_reaches_functions_as_it_is() -> None:
    agent = msgspec.structs.replace(rollout(), completion=SAID, rows=(row((5, 6, 7, 8, 3, 9), (0, 0, 0, 1, 0, 1)),))
    call = called(group_of(agent, rollout(branch=1, completion="42"), prompt=TALK))
    assert call.completions == [SAID, [{"role": "assistant", "content": "42"}]]
    assert call.completion_ids == [pack_ids((8, 3, 9)), pack_ids((8, 9))]


def test_functions_own_the_messages_with_everything_in_them() -> None:
    call = called(group_of(msgspec.structs.replace(rollout(), completion=SAID), prompt=TALK))
    for other in (call, own_copy(call)):
        message = other.completions[0][0]
        assert isinstance(message, dict)
        message["tool_calls"][0]["function"]["name"] = "changed"
        assert SAID[0]["tool_calls"][0]["function"]["name"] == "multiply"
    assert own_copy(call).completions[0][0] is not call.completions[0][0]


def test_functions_own_the_environments_with_everything_in_them() -> None:
    game = PlayedEnvironment("my_envs:Game", False, attributes={"board": [1, 2]})
    call = called(group_of(msgspec.structs.replace(rollout(), environment=game)))
    for other in (own_copy(call), call):
        assert other.environments is not None
        assert other.environments == [game]
        other.environments[0].attributes["board"].append(3)
        assert game.attributes == {"board": [1, 2]}


def test_the_text_of_a_conversation_is_the_assistant_s_last() -> None:
    assert text_of(SAID) == "It is 42."
    assert text_of(SAID[:2]) == ""
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([{"role": "model", "content": "42"}]) == "42"


def test_a_lost_rollout_reaches_no_function_and_says_why() -> None:
    lost = msgspec.structs.replace(rollout(), rows=(), completion=[], lost="a tool hung")
    group = group_of(lost, rollout(branch=1))
    call = called(group)
    assert (len(call.prompts), call.completions, call.columns) == (1, ["42"], {"answer": ["42"]})
    outcomes = (RewardOutcome("exact", "scored", 1.0, 2.0), RewardOutcome("brief", "scored", 0.0, 0.5))
    scored = with_rewards(group, [outcomes], CONFIG, by="rewarder-0")
    assert scored.rollouts[0].rewards == (
        RewardOutcome("exact", "lost", None, 2.0, "a tool hung"),
        RewardOutcome("brief", "lost", None, 0.5, "a tool hung"),
    )
    assert scored.rollouts[1].rewards == outcomes
    assert decode_scored_group(encode(scored)) == scored


def test_a_group_of_lost_rollouts_has_nothing_to_call_with() -> None:
    lost = msgspec.structs.replace(rollout(), rows=(), lost="x" * 1000)
    group = group_of(lost)
    call = called(group)
    assert (call.completions, call.policy_version) == ([], 0)
    (only,) = with_rewards(group, [], CONFIG, by="rewarder-0").rollouts
    assert (only.rewards[0].outcome, len(only.rewards[0].detail)) == ("lost", MAX_DETAIL_CHARS)


def test_the_reward_of_an_environment_is_one_more_outcome_with_weight_1() -> None:
    def played(branch: int, reward: float | None, observation: str) -> Rollout:
        environment = PlayedEnvironment("my_envs:Game", True, observation, reward, {"score": branch})
        return msgspec.structs.replace(rollout(branch=branch), environment=environment)

    lost = msgspec.structs.replace(
        rollout(branch=2), rows=(), completion=[], lost="it hung", environment=PlayedEnvironment("my_envs:Game", True)
    )
    group = group_of(played(0, 0.25, " Guess 1."), played(1, None, " Guess 2."), lost, prompt=TALK)
    call = called(group)
    assert [prompt[-1]["content"] for prompt in call.prompts if not isinstance(prompt, str)] == [
        "6*7? Guess 1.",
        "6*7? Guess 2.",
    ]
    assert call.environments is not None
    assert [environment.attributes for environment in call.environments] == [{"score": 0}, {"score": 1}]
    of_functions = (RewardOutcome("exact", "scored", 1.0, 2.0), RewardOutcome("brief", "scored", 0.0, 0.5))
    scored = with_rewards(group, [of_functions, of_functions], CONFIG, by="rewarder-0")
    assert [each.rewards[-1] for each in scored.rollouts] == [
        RewardOutcome("my_envs:Game", "scored", 0.25, 1.0),
        RewardOutcome("my_envs:Game", "not_applicable", None, 1.0),
        RewardOutcome("my_envs:Game", "lost", None, 1.0, "it hung"),
    ]
    assert decode_scored_group(encode(scored)) == scored


def test_an_environment_may_be_the_only_reward_and_one_without_a_reward_adds_no_outcome() -> None:
    alone = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=[], environment_factory="my_envs:Game")
    environment = PlayedEnvironment("my_envs:Game", True, reward=0.5)
    group = group_of(msgspec.structs.replace(rollout(), environment=environment))
    scored = with_rewards(group, [()], alone, by="rewarder-0")
    assert scored.rollouts[0].rewards == (RewardOutcome("my_envs:Game", "scored", 0.5, 1.0),)
    assert decode_scored_group(encode(scored)) == scored
    group = group_of(msgspec.structs.replace(rollout(), environment=PlayedEnvironment("my_envs:Quiet", False)))
    outcomes = (RewardOutcome("exact", "scored", 1.0, 2.0), RewardOutcome("brief", "scored", 0.0, 0.5))
    assert with_rewards(group, [outcomes], CONFIG, by="rewarder-0").rollouts[0].rewards == outcomes
