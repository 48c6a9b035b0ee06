"""The messages on the streams: one prompt group, at three moments of its life.

    PromptGroup  --generator-->  CompletedGroup  --rewarder-->  ScoredGroup
    (prompts)                    (completions)                  (scored)

Messages are frozen msgspec structs in msgpack, with packed arrays (arrays.py) and a schema version; nothing is ever
unpickled. A rollout is one row, whether it has one turn or many: ``token_ids`` is the whole sequence, ``loss_mask`` is
1 exactly on the tokens the policy sampled, and logprobs and version spans are indexed over those sampled tokens.
Decoding checks all rules of message_invariants.py, so the services do not check them again.
"""

import contextlib
from typing import Any, Literal, TypeVar

import msgspec

from shared.arrays import ID_DTYPE, Ids, Logprobs, unpack_ids, unpack_logprobs, unpack_mask
from shared.errors import MessageError
from shared.message_invariants import (
    Count,
    Finite,
    GroupId,
    IdBytes,
    Incarnation,
    Name,
    NumGenerations,
    Seconds,
    Version,
    check_prompt,
    check_rewards,
    check_rollouts,
    check_unscored,
)

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Outcome = Literal["scored", "not_applicable", "timeout", "invalid", "overload", "error"]
Prompt = str | list[dict[str, str]]
"""TRL's two formats: plain text, or a conversation of ``{"role": ..., "content": ...}``."""


def is_failure(outcome: Outcome) -> bool:
    """Whether a reward function should have scored a completion and could not."""
    return outcome not in ("scored", "not_applicable")


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens ``[start, end)`` of a rollout came from this policy version.

    ``incarnation`` is the incarnation of the trainer that pushed it (lineage.py); 0 if the generator does not say.
    """

    policy_version: Version
    start: Count
    end: Count
    incarnation: Incarnation = 0


class Turn(msgspec.Struct, frozen=True):
    """One turn over ``token_ids[start:end]``; times are Unix seconds."""

    role: str
    start: Count
    end: Count
    finish_reason: str | None
    started_at_s: Seconds
    ended_at_s: Seconds


class RewardOutcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one reward function for one completion. Only ``scored`` has a value.

    ``components`` are the parts of the value, if the function reports them. ``version`` identifies the function: the
    same code, or the same endpoint, has the same version. It is empty if unknown.
    """

    name: Name
    outcome: Outcome
    value: Finite | None
    weight: Finite
    detail: str = ""
    latency_s: Seconds = 0.0
    components: dict[str, Finite] = {}
    version: str = ""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A moment in a group's life: what happened, when (Unix seconds), and which replica did it."""

    event: str
    at_s: Seconds
    by: str


class Rollout(msgspec.Struct, frozen=True):
    """One prompt with one completion and, once scored, its rewards.

    ``completion`` is the decoded text of the sampled tokens without special tokens.
    """

    rollout_id: Name
    group_id: str
    branch: Count
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    completion: str
    rewards: tuple[RewardOutcome, ...] = ()

    def completion_ids(self) -> Ids:
        """Return the sampled token ids, in order."""
        return unpack_ids(self.packed_completion_ids()).copy()

    def packed_completion_ids(self) -> bytes:
        """Return the sampled token ids in order, packed as they came."""
        num_sampled = self.loss_mask.count(1)
        if num_sampled and self.loss_mask.endswith(b"\1" * num_sampled):  # one turn: they are at the end
            return self.token_ids[-ID_DTYPE.itemsize * num_sampled :]
        sampled: Ids = unpack_ids(self.token_ids)[unpack_mask(self.loss_mask) == 1]
        return sampled.tobytes()

    def generator_logprobs(self) -> Logprobs:
        """Return log p of each sampled token under the distribution it was sampled from, in nats; NaN means unknown."""
        return unpack_logprobs(self.logprobs)

    def oldest_policy_version(self) -> int:
        """Return the policy version of the oldest sampled token."""
        return min(span.policy_version for span in self.version_spans)

    def is_truncated(self) -> bool:
        """Whether the completion hit a length limit instead of ending by itself."""
        return self.turns[-1].finish_reason == "length"


class PromptGroup(msgspec.Struct, frozen=True, tag="prompt_group"):
    """A prompt to be completed ``num_generations`` times.

    ``group_id`` is the admission number in decimal (``"00000042"``): a position in the dataset has one id, so
    re-reading the dataset admits nothing twice. Ids of evaluation groups are not numbers
    (``"eval-0001-00000010-00000003"``); generators and rewarders treat these groups like all others. ``columns``
    contains every other column of the dataset row.
    """

    run_id: Name
    group_id: GroupId
    prompt: Prompt
    prompt_ids: IdBytes
    columns: dict[str, Any]
    num_generations: NumGenerations
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION


class CompletedGroup(msgspec.Struct, frozen=True, tag="completed_group"):
    """A whole group with its completions, not scored yet."""

    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION


class ScoredGroup(msgspec.Struct, frozen=True, tag="scored_group"):
    """A whole group. Every rollout has one outcome for each reward function of the run."""

    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def oldest_policy_version(self) -> int:
        """Return the policy version of the oldest token in the group."""
        return min(rollout.oldest_policy_version() for rollout in self.rollouts)


Group = PromptGroup | CompletedGroup | ScoredGroup
_GroupT = TypeVar("_GroupT", PromptGroup, CompletedGroup, ScoredGroup)


_decoder: msgspec.msgpack.Decoder[Group] = msgspec.msgpack.Decoder(Group)
"""Decodes all kinds. A msgspec decoder for one kind would accept a message that does not name its kind."""


class _Head(msgspec.Struct):
    """The field with the schema version. It can be read even if the rest of a message cannot."""

    schema_version: int


def encode(group: Group) -> bytes:
    """Return the group as one stream payload.

    Raises:
        MessageError: The group is too large, or has what the wire cannot carry (a lone surrogate, an unknown type).
    """
    try:
        data = msgspec.msgpack.encode(group)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"the group cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"the group takes {len(data)} bytes, more than the {MAX_MESSAGE_BYTES} a stream entry may")
    return data


def decode_prompt_group(data: bytes) -> PromptGroup:
    """Return the prompt group in ``data``. Raises MessageError if it is not one."""
    group = _decode(data, PromptGroup)
    check_prompt(group)
    return group


def decode_completed_group(data: bytes) -> CompletedGroup:
    """Return the completed group in ``data``. Raises MessageError if it is not one, or is not whole."""
    group = _decode(data, CompletedGroup)
    check_rollouts(group.prompt, group.rollouts)
    check_unscored(group.rollouts)
    return group


def decode_scored_group(data: bytes) -> ScoredGroup:
    """Return the scored group in ``data``. Raises MessageError if it is not one, or is not whole."""
    group = _decode(data, ScoredGroup)
    check_rollouts(group.prompt, group.rollouts)
    check_rewards(group.rollouts)
    return group


def require_place(prompt: PromptGroup, *, run_id: str, label: str) -> None:
    """Raise MessageError unless the group's id is its entry's label and its run is the stream's run."""
    if prompt.group_id != label:
        raise MessageError(f"the entry is labelled {label[:200]!r} but holds group {prompt.group_id!r}")
    if prompt.run_id != run_id:
        raise MessageError(f"the entry is on a stream of run {run_id} but holds a group of run {prompt.run_id[:200]}")


def _decode(data: bytes, kind: type[_GroupT]) -> _GroupT:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(data)} bytes is more than the {MAX_MESSAGE_BYTES} a stream entry may take")
    try:
        group = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _check_version(data)
        raise MessageError(f"not a {kind.__name__}: {error}") from error
    if not isinstance(group, kind):
        raise MessageError(f"not a {kind.__name__}: a {type(group).__name__}")
    if group.schema_version != SCHEMA_VERSION:
        _check_version(data)
    return group


def _check_version(data: bytes) -> None:
    """Raise MessageError if the message was written by another release."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        version = msgspec.msgpack.decode(data, type=_Head).schema_version
        if version != SCHEMA_VERSION:
            raise MessageError(
                f"schema version {version} was written by another release; this one reads {SCHEMA_VERSION}"
            )
