"""The validity rules of all stream messages. messages.py checks them when it decodes a message.

Fields, by their type:

    policy version, incarnation     0 to 10^12 - 1, and to 10^8 - 1: the digits in the name of a version's directory
    time, duration                  0 to 10^11 seconds: finite, and not milliseconds
    value, weight, component        a finite number
    num_generations                 1 to 1,024
    group id                        letters, digits, ``.``, ``_`` and ``-``: it becomes part of file names

A prompt group:

    prompt ids are whole and not negative; they are empty if the session that plays the rollouts renders the prompt
    columns consist of None, bool, int, float, str, bytes, datetimes, lists and maps from text, at most 32 levels deep

A completed group, in addition:

    it has num_generations rollouts of its own group id; their branches are 0 to num_generations - 1, each once
    rollout ids are unique
    a rollout has at least one row, unless it is lost; the messages of its completion have only types that columns have
    no more tool calls failed than were made
    all rollouts have an environment of the same type, or none has one. Its attributes have only column types.
    Its reward is None if environments of its type give none, or if the rollout is lost
    nothing is scored yet

Each row of a rollout:

    token ids are not negative; there is one for each mask entry; they begin with the prompt ids, or with at least one
    other token if the group has no prompt ids; these first tokens are not sampled
    the mask is 0 or 1, and marks at least one token as sampled
    there is one logprob for each sampled token. It is at most 0 (1e-3 is allowed, for rounding) and not infinite. NaN
    means that the generator does not know it; at least one logprob of a row is a number
    version spans tile the sampled tokens in order, and none is empty
    turns are in order, are not empty, do not overlap, lie within the tokens, and contain every sampled token

A scored group, instead of the last rule for rollouts:

    every rollout has outcomes of the same functions with the same weights, in the same order, at least one
    an outcome has a value if and only if it is ``scored``, and is ``lost`` if and only if its rollout is

Limits that only the run knows (its vocabulary, its steps) are checked in services/trainer/intake/scored_groups.py.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from msgspec import Meta

from shared.arrays import unpack_ids, unpack_logprobs
from shared.errors import MessageError

if TYPE_CHECKING:
    from shared.messages import PromptGroup, Rollout, Row

MAX_GENERATIONS: Final = 1024
MAX_POLICY_VERSION: Final = 10**12 - 1
MAX_INCARNATION: Final = 10**8 - 1
_MAX_SECONDS: Final = 1e11
MAX_LOGPROB: Final = 1e-3
"""In nats. Rounding can raise a logprob of 0 this far."""
_MAX_DEPTH: Final = 32
_LARGEST: Final = float(np.finfo(np.float64).max)

Version = Annotated[int, Meta(ge=0, le=MAX_POLICY_VERSION)]
Incarnation = Annotated[int, Meta(ge=0, le=MAX_INCARNATION)]
Count = Annotated[int, Meta(ge=0)]
NumGenerations = Annotated[int, Meta(ge=1, le=MAX_GENERATIONS)]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
GroupId = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z][0-9A-Za-z._-]{0,127}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
IdBytes = Annotated[bytes, Meta(min_length=4)]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, datetime})


def check_prompt(group: "PromptGroup") -> None:
    """Raise MessageError unless a group's packed prompt ids and its columns are valid."""
    where = f"group {group.group_id}"
    if len(group.prompt_ids) % 4:
        raise MessageError(f"{where} has {len(group.prompt_ids)} bytes of prompt ids")
    if unpack_ids(group.prompt_ids).min(initial=0) < 0:
        raise MessageError(f"{where} has a negative prompt id")
    _check_columns(group)


def check_rollouts(prompt: "PromptGroup", rollouts: Sequence["Rollout"]) -> None:
    """Raise MessageError unless a group's prompt and rollouts are complete and consistent. Rewards are not checked."""
    num_prompt, rest = divmod(len(prompt.prompt_ids), 4)
    if rest:
        raise MessageError(f"group {prompt.group_id} has {len(prompt.prompt_ids)} bytes of prompt ids")
    _check_columns(prompt)
    if len(rollouts) != prompt.num_generations:
        raise MessageError(f"group {prompt.group_id} has {len(rollouts)} rollouts instead of {prompt.num_generations}")
    if {rollout.branch for rollout in rollouts} != set(range(len(rollouts))):
        branches = [rollout.branch for rollout in rollouts[:10]]
        raise MessageError(f"group {prompt.group_id} has branches that are not 0 to {len(rollouts) - 1}: {branches}")
    if len({rollout.rollout_id for rollout in rollouts}) < len(rollouts):
        raise MessageError(f"group {prompt.group_id} has two rollouts with the same id")
    if (
        len(
            {rollout.environment and (rollout.environment.name, rollout.environment.has_reward) for rollout in rollouts}
        )
        > 1
    ):
        raise MessageError(f"group {prompt.group_id} has rollouts in environments of different types")
    unsampled = bytes(max(num_prompt, 1))
    for rollout in rollouts:
        _check_rollout(rollout, prompt)
        for row in rollout.rows:
            _check_row(row, rollout, prompt, unsampled)
    rows = [row for rollout in rollouts for row in rollout.rows]
    # One call for all rows: numpy takes as long for one. With a NaN the comparison fails, and each is checked.
    if unpack_ids(b"".join([row.token_ids for row in rows])).min(initial=0) < 0:
        raise MessageError(f"group {prompt.group_id} has a negative token id")
    logprobs = unpack_logprobs(b"".join([row.logprobs for row in rows]))
    if not (logprobs.max(initial=-1.0) <= MAX_LOGPROB and logprobs.min(initial=-1.0) > -math.inf):
        for rollout in rollouts:
            for row in rollout.rows:
                _check_logprobs(row, rollout)


def check_unscored(rollouts: Sequence["Rollout"]) -> None:
    """Raise MessageError if any rollout already has rewards."""
    for rollout in rollouts:
        if rollout.rewards:
            raise _wrong(rollout, "has rewards, although it was not scored yet")


def check_rewards(rollouts: Sequence["Rollout"]) -> None:
    """Raise MessageError unless all rollouts have consistent outcomes of the same reward functions, at least one."""
    first = rollouts[0].rewards
    if not first:
        raise _wrong(rollouts[0], "has no outcome of a reward function")
    for rollout in rollouts:
        if len(rollout.rewards) != len(first):
            raise _wrong(
                rollout, f"has outcomes of {len(rollout.rewards)} reward functions, another rollout of {len(first)}"
            )
        for reward, of_first in zip(rollout.rewards, first, strict=True):
            if reward.name != of_first.name or reward.weight != of_first.weight:
                raise _wrong(
                    rollout,
                    f"has reward {reward.name!r} where another rollout has {of_first.name!r}, or another weight",
                )
            if (reward.outcome == "scored") != (reward.value is not None):
                raise MessageError(f"reward {reward.name!r} says {reward.outcome} with value {reward.value}")
            if (reward.outcome == "lost") != bool(rollout.lost):
                raise _wrong(rollout, f"has reward {reward.name!r} {reward.outcome}, and is lost: {bool(rollout.lost)}")


def _check_rollout(rollout: "Rollout", prompt: "PromptGroup") -> None:
    if rollout.group_id != prompt.group_id:
        raise _wrong(rollout, f"belongs to group {rollout.group_id}, not {prompt.group_id}")
    if not (rollout.rows or rollout.lost):
        raise _wrong(rollout, "has no row, although it is not lost")
    if rollout.tool_failures > rollout.tool_calls:
        raise _wrong(rollout, f"has {rollout.tool_failures} failed tool calls of {rollout.tool_calls}")
    if not is_data(rollout.completion):
        raise _wrong(rollout, f"has messages that are nested deeper than {_MAX_DEPTH}, or a value that is not data")
    environment = rollout.environment
    if environment is None:
        return
    if environment.reward is not None and (rollout.lost or not environment.has_reward):
        raise _wrong(rollout, "has a reward of its environment, although it is lost, or the environment gives none")
    if not is_data(environment.attributes):
        raise _wrong(rollout, "has an environment with an attribute that is not data")


def _check_row(row: "Row", rollout: "Rollout", prompt: "PromptGroup", unsampled: bytes) -> None:
    mask = row.loss_mask
    if len(row.token_ids) != 4 * len(mask):
        raise _wrong_row(row, rollout, f"has {len(row.token_ids)} bytes of token ids for {len(mask)} mask entries")
    if not (row.token_ids.startswith(prompt.prompt_ids) and mask.startswith(unsampled)):
        raise _wrong_row(row, rollout, "does not begin with the prompt of its group, or marks it as sampled")
    num_sampled = len(mask) - len(unsampled)
    if not mask.endswith(b"\1" * num_sampled):  # several turns; counting takes longer than all other checks
        num_sampled = mask.count(1)
        if num_sampled + mask.count(0) != len(mask):
            raise _wrong_row(row, rollout, "has a loss mask that is not 0/1")
    if num_sampled == 0:
        raise _wrong_row(row, rollout, "has a loss mask that marks no sampled token")
    if len(row.logprobs) != 4 * num_sampled:
        raise _wrong_row(row, rollout, f"has {len(row.logprobs)} bytes of logprobs for {num_sampled} sampled tokens")
    end = 0
    for span in row.version_spans:
        if span.start != end or span.end <= span.start:
            raise _wrong_row(row, rollout, f"has version spans that do not tile its tokens: {row.version_spans[:10]}")
        end = span.end
    if end != num_sampled:
        raise _wrong_row(row, rollout, f"has version spans over {end} of its {num_sampled} sampled tokens")
    if not row.turns:
        raise _wrong_row(row, rollout, "has no turn")
    end, num_outside = 0, 0
    for turn in row.turns:
        if not end <= turn.start < turn.end <= len(mask):
            raise _wrong_row(
                row,
                rollout,
                f"has a turn from {turn.start} to {turn.end} that is empty, overlaps the one before it, or ends beyond "
                f"the {len(mask)} tokens",
            )
        num_outside += mask.count(1, end, turn.start)  # only between turns, where there are few tokens to count
        end = turn.end
    num_outside += mask.count(1, end)
    if num_outside:
        raise _wrong_row(row, rollout, f"has {num_outside} sampled tokens outside its turns")


def _wrong(rollout: "Rollout", what: str) -> MessageError:
    return MessageError(f"rollout {rollout.rollout_id} {what}")


def _wrong_row(row: "Row", rollout: "Rollout", what: str) -> MessageError:
    return MessageError(f"row {rollout.rows.index(row)} of rollout {rollout.rollout_id} {what}")


def _check_logprobs(row: "Row", rollout: "Rollout") -> None:
    logprobs = row.generator_logprobs()
    # NaN means that the engine does not know a token's logprob. If all are NaN, the engine is broken.
    if bool(((logprobs > MAX_LOGPROB) | (logprobs == -math.inf)).any()) or bool(np.isnan(logprobs).all()):
        raise _wrong_row(row, rollout, "has a logprob that is positive or infinite, or only NaN")


def _check_columns(group: "PromptGroup") -> None:
    for name, value in group.columns.items():
        if type(value) not in _PLAIN and not is_data(value):
            raise MessageError(
                f"group {group.group_id} has a column {name[:100]!r} that is nested deeper than {_MAX_DEPTH}, or "
                "contains a value that is not data"
            )


def is_data(value: Any, *, depth: int = 1, max_depth: int = _MAX_DEPTH) -> bool:
    """Return whether a value has only types that dataset columns may have, at most ``max_depth`` levels deep.

    ``depth`` is the value's own level, from 1.
    """
    kind: type[Any] = value.__class__
    if kind in _PLAIN:
        return True
    if depth > max_depth or kind not in (list, dict) or (kind is dict and not set(map(type, value)) <= {str}):
        return False
    inside: list[Any] = list(value.values()) if kind is dict else value
    # Long lists nearly always contain only plain values, and this checks them in C.
    return set(map(type, inside)) <= _PLAIN or all(
        is_data(each, depth=depth + 1, max_depth=max_depth) for each in inside
    )
