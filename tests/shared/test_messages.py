"""Every message on the wire is either decoded to a valid group or refused with a MessageError."""

import math
import random
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.errors import MessageError
from shared.messages import (
    MAX_MESSAGE_BYTES,
    PlayedEnvironment,
    RewardOutcome,
    Rollout,
    Row,
    Stamp,
    Turn,
    VersionSpan,
    decode_completed_group,
    decode_prompt_group,
    decode_scored_group,
    encode,
    oldest_policy_version,
    prompt_of,
    with_observation,
)
from tests.groups import completed_group, prompt_group, rollout, row, scored_group, with_row

pytestmark = pytest.mark.unit

ENVIRONMENT = PlayedEnvironment(
    "my_envs:Game", True, " Guess.", 0.5, {"board": [1, {"a": None}]}, {"client": "TypeError: ..."}
)


def turn(start: int, end: int, *, ended_at_s: float = 3.0) -> Turn:
    return Turn("assistant", start, end, "stop", 2.0, ended_at_s)


def rollout_of(*rows: Row, **changes: Any) -> Rollout:
    return msgspec.structs.replace(rollout(), rows=rows, **changes)


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def test_every_kind_of_group_survives_the_wire() -> None:
    assert decode_prompt_group(encode(prompt_group())) == prompt_group()
    assert decode_completed_group(encode(completed_group())) == completed_group()
    assert decode_scored_group(encode(scored_group())) == scored_group()


def test_a_row_yields_its_sampled_tokens_and_their_logprobs() -> None:
    one_turn = row((5, 6, 7, 8, 9, 10), (0, 0, 0, 1, 1, 1))
    two_turns = row((5, 6, 8, 3, 9, 10, 4), (0, 0, 1, 0, 1, 1, 0))
    for each, num_prompt in ((one_turn, 3), (two_turns, 2)):
        assert (each.num_prompt, each.num_sampled) == (num_prompt, 3)
        assert each.sampled_ids().tolist() == [8, 9, 10]
        assert each.generator_logprobs().tolist() == [-0.5, -0.5, -0.5]


def test_the_completion_ids_of_a_rollout_contain_tool_results_as_in_trl() -> None:
    forked = rollout_of(row((5, 8, 3, 9), (0, 1, 0, 1)), row((5, 8, 4, 10), (0, 0, 0, 1)))
    assert forked.packed_completion_ids() == pack_ids((8, 3, 9, 10))
    assert forked.num_sampled == 3


def test_a_rollout_is_truncated_if_the_turn_that_ended_last_is() -> None:
    def ended(finish_reason: str, at_s: float) -> Row:
        one = row((5, 8), (0, 1), finish_reason=finish_reason)
        return msgspec.structs.replace(one, turns=(msgspec.structs.replace(one.turns[0], ended_at_s=at_s),))

    assert rollout_of(ended("stop", 3.0), ended("length", 4.0)).is_truncated()
    assert rollout_of(ended("length", 4.0), ended("stop", 3.0)).is_truncated()
    assert not rollout_of(ended("stop", 4.0), ended("length", 3.0)).is_truncated()
    assert not rollout_of(lost="a tool hung").is_truncated()


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = scored_group(policy_version=7)
    mixed = with_row(group.rollouts[1], version_spans=(VersionSpan(5, 0, 1), VersionSpan(8, 1, 2)))
    group = msgspec.structs.replace(group, rollouts=(group.rollouts[0], mixed))
    assert oldest_policy_version(group) == 5
    second = msgspec.structs.replace(mixed, rows=(*group.rollouts[0].rows, row((5, 6, 7, 8), (0, 0, 0, 1), 4)))
    assert oldest_policy_version(msgspec.structs.replace(group, rollouts=(group.rollouts[0], second))) == 4
    lost = rollout_of(lost="a tool hung")
    assert oldest_policy_version(msgspec.structs.replace(group, rollouts=(group.rollouts[0], lost))) == 7
    assert oldest_policy_version(msgspec.structs.replace(group, rollouts=(lost,))) == 0


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(MessageError, match="not a CompletedGroup"):
        decode_completed_group(encode(prompt_group()))


def test_another_schema_version_is_named_in_the_refusal() -> None:
    data = encode(msgspec.structs.replace(prompt_group(), schema_version=99))
    with pytest.raises(MessageError, match="schema version 99 was written by another release"):
        decode_prompt_group(data)


def test_a_group_that_is_not_whole_is_refused() -> None:
    group = completed_group(num_generations=2)
    with pytest.raises(MessageError, match="has 1 rollouts instead of 2"):
        decode_completed_group(encode(msgspec.structs.replace(group, rollouts=group.rollouts[:1])))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": pack_logprobs([-0.5])}, "4 bytes of logprobs for 2 sampled tokens"),
        ({"loss_mask": pack_mask([0, 0, 0, 1])}, "20 bytes of token ids for 4 mask entries"),
        ({"loss_mask": pack_mask([0] * 5)}, "marks no sampled token"),
        ({"loss_mask": pack_mask([0, 0, 0, 1, 2])}, "not 0/1"),
        ({"logprobs": pack_logprobs([float("nan")] * 2)}, "or only NaN"),
        ({"logprobs": pack_logprobs([-0.5, -math.inf])}, "positive or infinite"),
        ({"logprobs": pack_logprobs([-0.5, 0.7])}, "has a logprob that is positive or infinite"),
        ({"version_spans": (VersionSpan(0, 0, 1),)}, "over 1 of its 2 sampled tokens"),
        ({"version_spans": (VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))}, "do not tile"),
        ({"turns": ()}, "has no turn"),
        ({"token_ids": pack_ids([1, 2, 3])}, "12 bytes of token ids for 5 mask entries"),
        ({"token_ids": pack_ids([5, 6, 7, 8, -7])}, "has a negative token id"),
        ({"token_ids": pack_ids([5, 6, 8, 8, 9])}, "does not begin with the prompt of its group"),
        ({"loss_mask": pack_mask([0, 0, 1, 1, 1]), "logprobs": pack_logprobs([-0.5] * 3)}, "marks it as sampled"),
        ({"version_spans": (VersionSpan(-1, 0, 2),)}, r"`int` >= 0 - at `\$\.rollouts"),
        ({"version_spans": (VersionSpan(10**12, 0, 2),)}, "`int` <= 999999999999"),
        ({"version_spans": (VersionSpan(0, 0, 2, -3),)}, "`int` >= 0"),
        (
            {"turns": (turn(3, 6),)},
            "a turn from 3 to 6 that is empty, overlaps the one before it, or ends beyond the 5",
        ),
        ({"turns": (turn(3, 3),)}, "a turn from 3 to 3 that is empty"),
        ({"turns": (turn(0, 4), turn(3, 5))}, "overlaps the one before it"),
        ({"turns": (turn(0, 4),)}, "1 sampled tokens outside its turns"),
        ({"turns": (turn(3, 5, ended_at_s=math.nan),)}, "`float` >= 0.0"),
        ({"turns": (turn(3, 5, ended_at_s=1.7e12),)}, "`float` <= 100000000000.0"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change: dict[str, Any], reason: str) -> None:
    group = completed_group()
    first, second = group.rollouts
    (good,) = first.rows
    bad = msgspec.structs.replace(good, **change)
    for rows in ((bad,), (good, bad)):
        broken = msgspec.structs.replace(first, rows=rows)
        with pytest.raises(MessageError, match=reason):
            decode_completed_group(encode(msgspec.structs.replace(group, rollouts=(broken, second))))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_id": "00000001"}, "belongs to group 00000001"),
        ({"branch": 1}, r"branches that are not 0 to 1: \[1, 1\]"),
        ({"branch": 2}, r"branches that are not 0 to 1: \[2, 1\]"),
        ({"branch": -1}, "`int` >= 0"),
        ({"rollout_id": "00000000-1"}, "two rollouts with the same id"),
        ({"rewards": (RewardOutcome("exact", "scored", 1.0, 1.0),)}, "has rewards, although it was not scored yet"),
        ({"rows": ()}, "rollout 00000000-0 has no row, although it is not lost"),
        ({"tool_calls": 1, "tool_failures": 2}, "has 2 failed tool calls of 1"),
        ({"tool_calls": -1}, "`int` >= 0"),
        ({"completion": [{"role": "tool", "content": deep(40)}]}, "has messages that are nested deeper than 32"),
        ({"completion": [{"role": "tool", "content": msgspec.msgpack.Ext(5, b"x")}]}, "a value that is not data"),
        ({"completion": ["text"]}, r"at `\$\.rollouts\[0\]\.completion\[0\]`"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused(change: dict[str, Any], reason: str) -> None:
    group = completed_group()
    broken = msgspec.structs.replace(group.rollouts[0], **change)
    data = encode(msgspec.structs.replace(group, rollouts=(broken, *group.rollouts[1:])))
    with pytest.raises(MessageError, match=reason):
        decode_completed_group(data)


@pytest.mark.parametrize(
    ("change", "lost", "reason"),
    [
        ({"name": "my_envs:Other"}, "", "rollouts in environments of different types"),
        ({"has_reward": False, "reward": None}, "", "rollouts in environments of different types"),
        ({}, "it hung", "has a reward of its environment, although it is lost"),
        ({"attributes": {"deep": deep(40)}}, "", "has an environment with an attribute that is not data"),
        ({"name": ""}, "", "length >= 1"),
        ({"reward": math.inf}, "", "`float` <= "),
    ],
)
def test_an_environment_that_contradicts_its_group_is_refused(change: dict[str, Any], lost: str, reason: str) -> None:
    group = completed_group()
    good = [msgspec.structs.replace(rollout, environment=ENVIRONMENT) for rollout in group.rollouts]
    changed = msgspec.structs.replace(ENVIRONMENT, **change)
    first = msgspec.structs.replace(good[0], environment=changed, lost=lost)
    with pytest.raises(MessageError, match=reason):
        decode_completed_group(encode(msgspec.structs.replace(group, rollouts=(first, *good[1:]))))


def test_a_reward_needs_an_environment_that_gives_one() -> None:
    group = completed_group()
    gives_none = msgspec.structs.replace(ENVIRONMENT, has_reward=False)
    rollouts = tuple(msgspec.structs.replace(rollout, environment=gives_none) for rollout in group.rollouts)
    with pytest.raises(MessageError, match="or the environment gives none"):
        decode_completed_group(encode(msgspec.structs.replace(group, rollouts=rollouts)))


def test_rollouts_with_environments_survive_the_wire_and_each_has_its_own_prompt() -> None:
    group = completed_group()
    talk = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}]
    group = msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, prompt=talk))
    first, second = group.rollouts
    lost = PlayedEnvironment("my_envs:Game", True)
    rollouts = (
        msgspec.structs.replace(first, environment=ENVIRONMENT),
        msgspec.structs.replace(second, environment=lost, lost="it hung"),
    )
    group = msgspec.structs.replace(group, rollouts=rollouts)
    assert decode_completed_group(encode(group)) == group
    assert prompt_of(rollouts[0], group.prompt) == [talk[0], {"role": "user", "content": "Begin. Guess."}]
    assert prompt_of(rollouts[1], group.prompt) == talk
    assert prompt_of(first, group.prompt) == talk
    assert with_observation("Begin.", " Guess.") == "Begin. Guess."
    for prompt in ([], [{"role": "user"}]):
        with pytest.raises(MessageError, match="no last message with text"):
            with_observation(prompt, " Guess.")


def test_a_wrong_row_is_named() -> None:
    group = completed_group()
    forked = msgspec.structs.replace(group.rollouts[0], rows=(*group.rollouts[0].rows, row((5, 6, 7), (0, 0, 0))))
    with pytest.raises(MessageError, match="row 1 of rollout 00000000-0 has a loss mask that marks no sampled token"):
        decode_completed_group(encode(msgspec.structs.replace(group, rollouts=(forked, group.rollouts[1]))))


def test_a_rollout_of_several_rows_and_a_lost_one_survive_the_wire() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}
    forked = msgspec.structs.replace(
        rollout(),
        rows=(row((5, 6, 7, 8, 3, 9), (0, 0, 0, 1, 0, 1)), row((5, 6, 7, 8, 4, 10), (0, 0, 0, 0, 0, 1), 2)),
        completion=[call, {"role": "tool", "content": "42"}],
        tool_calls=2,
        tool_failures=1,
    )
    lost = msgspec.structs.replace(rollout(branch=1), rows=(), completion=[], lost="a tool hung")
    group = msgspec.structs.replace(completed_group(), rollouts=(forked, lost))
    assert decode_completed_group(encode(group)) == group
    only_lost = (msgspec.structs.replace(lost, branch=0, rollout_id="00000000-0"), lost)
    group = msgspec.structs.replace(group, rollouts=only_lost)
    assert decode_completed_group(encode(group)) == group


def test_the_rows_of_a_group_without_prompt_ids_begin_with_tokens_of_their_own() -> None:
    group = completed_group()
    group = msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, prompt_ids=b""))
    assert decode_prompt_group(encode(group.prompt)) == group.prompt
    assert decode_completed_group(encode(group)) == group
    sampled = msgspec.structs.replace(group.rollouts[0], rows=(row((8, 9), (1, 1)),))
    with pytest.raises(MessageError, match="or marks it as sampled"):
        decode_completed_group(encode(msgspec.structs.replace(group, rollouts=(sampled, group.rollouts[1]))))


@pytest.mark.parametrize("num_generations", [0, -1, 1025, 2**31, 2**63])
def test_a_prompt_asks_for_as_many_completions_as_a_run_file_may(num_generations: int) -> None:
    with pytest.raises(MessageError, match=r"`int` (>= 1|<= 1024) - at `\$\.num_generations`"):
        decode_prompt_group(encode(msgspec.structs.replace(prompt_group(), num_generations=num_generations)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_id": "../../etc"}, r"at `\$\.group_id`"),
        ({"group_id": ""}, r"at `\$\.group_id`"),
        ({"prompt_ids": b"abc"}, "has 3 bytes of prompt ids"),
        ({"prompt_ids": pack_ids([5, -1])}, "has a negative prompt id"),
        ({"stamps": (Stamp("admitted", math.inf, "t"),)}, "`float` <= 100000000000.0"),
        (
            {"columns": {"a": deep(40)}},
            "column 'a' that is nested deeper than 32, or contains a value that is not data",
        ),
        ({"columns": {"a": {1: 2}}}, "contains a value that is not data"),
        ({"columns": {"a": msgspec.msgpack.Ext(5, b"x")}}, "contains a value that is not data"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_prompt_group(encode(msgspec.structs.replace(prompt_group(), **change)))


def test_columns_hold_what_data_sets_hold() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    columns = {"a": [1, 2.5, None, True, "x", b"y", {"when": when}], "b": deep(30), "c": math.inf}
    group = msgspec.structs.replace(prompt_group(), columns=columns)
    assert decode_prompt_group(encode(group)) == group


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": math.nan}, "`float` >= -1"),
        ({"value": None}, "says scored with value None"),
        ({"outcome": "error", "value": math.inf}, "`float` <= 1"),
        ({"weight": math.nan}, "`float` >= -1"),
        ({"weight": 2.0}, "has reward 'exact' where another rollout has 'exact', or another weight"),
        ({"name": "other"}, "has reward 'exact' where another rollout has 'other'"),
        ({"outcome": "lost", "value": None}, "has reward 'exact' lost, and is lost: False"),
        ({"latency_s": -1.0}, "`float` >= 0.0"),
        ({"components": {"a": math.nan}}, "`float` >= -1"),
    ],
)
def test_an_outcome_that_cannot_be_is_refused(change: dict[str, Any], reason: str) -> None:
    group = scored_group()
    reward = msgspec.structs.replace(group.rollouts[0].rewards[0], **change)
    changed = msgspec.structs.replace(group.rollouts[0], rewards=(reward,))
    with pytest.raises(MessageError, match=reason):
        decode_scored_group(encode(msgspec.structs.replace(group, rollouts=(changed, group.rollouts[1]))))


def test_every_rollout_has_an_outcome_of_every_function() -> None:
    group = scored_group()
    for rewards, reason in (((), "has no outcome"), (group.rollouts[0].rewards * 2, "of 1 reward functions, another")):
        changed = msgspec.structs.replace(group.rollouts[0], rewards=rewards)
        with pytest.raises(MessageError, match=reason):
            decode_scored_group(encode(msgspec.structs.replace(group, rollouts=(changed, group.rollouts[1]))))


def test_a_message_without_a_kind_is_refused() -> None:
    tree = msgspec.msgpack.decode(encode(scored_group()))
    del tree["type"]
    with pytest.raises(MessageError, match="not a ScoredGroup"):
        decode_scored_group(msgspec.msgpack.encode(tree))


def test_the_logprob_of_a_token_may_be_unknown() -> None:
    group = completed_group()
    unsure = with_row(group.rollouts[0], logprobs=pack_logprobs([-0.5, float("nan")]))
    decoded = decode_completed_group(encode(msgspec.structs.replace(group, rollouts=(unsure, *group.rollouts[1:]))))
    assert [math.isnan(value) for value in decoded.rollouts[0].rows[0].generator_logprobs()] == [False, True]


def test_the_outcomes_of_a_lost_rollout_are_lost() -> None:
    group = scored_group()
    outcome = RewardOutcome("exact", "lost", None, 1.0, "a tool hung")
    lost = msgspec.structs.replace(group.rollouts[0], lost="a tool hung", rewards=(outcome,))
    there = msgspec.structs.replace(group, rollouts=(lost, group.rollouts[1]))
    assert decode_scored_group(encode(there)) == there
    lie = msgspec.structs.replace(lost, rewards=group.rollouts[0].rewards)
    with pytest.raises(MessageError, match="has reward 'exact' scored, and is lost: True"):
        decode_scored_group(encode(msgspec.structs.replace(group, rollouts=(lie, group.rollouts[1]))))


def test_a_failed_reward_cannot_carry_a_value() -> None:
    group = scored_group()
    lie = msgspec.structs.replace(group.rollouts[0].rewards[0], outcome="timeout", value=0.0)
    changed = msgspec.structs.replace(group.rollouts[0], rewards=(lie,))
    with pytest.raises(MessageError, match=r"says timeout with value 0\.0"):
        decode_scored_group(encode(msgspec.structs.replace(group, rollouts=(changed, group.rollouts[1]))))


def test_a_value_that_the_wire_cannot_carry_is_refused_before_it_is_sent() -> None:
    with pytest.raises(MessageError, match="cannot be encoded"):
        encode(msgspec.structs.replace(prompt_group(), prompt="\ud800"))
    with pytest.raises(MessageError, match="more than the"):
        encode(msgspec.structs.replace(prompt_group(), prompt="x" * (MAX_MESSAGE_BYTES + 1)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_a_message_error(data: bytes) -> None:
    for decode in (decode_prompt_group, decode_completed_group, decode_scored_group):
        with pytest.raises(MessageError):
            decode(data)


def test_flipped_bytes_are_decoded_to_a_sound_group_or_refused() -> None:
    chance, data = random.Random(0), encode(scored_group())
    refused = 0
    for _ in range(20_000):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        try:
            group = decode_scored_group(bytes(mutated))
        except MessageError:
            refused += 1
        else:
            assert len(group.rollouts) == group.prompt.num_generations
    assert refused > 5_000
