"""The messages on the streams: one prompt group, at three moments of its life.

    PromptGroup  --generator-->  CompletedGroup  --rewarder-->  ScoredGroup
    (prompts)                    (completions)                  (scored)

Messages are frozen msgspec structs in msgpack, with packed arrays (arrays.py) and a schema version; nothing is ever
unpickled. A rollout has one row of tokens, whether it has one turn or many. Another row begins where the history was
rewritten, because the tokens so far are then no longer the beginning of the conversation.

    turns       prompt  assistant  tool  assistant
    token_ids   p p p   a a a a    t t   a a a
    loss_mask   0 0 0   1 1 1 1    0 0   1 1 1      1 exactly on the tokens the policy sampled, in one row only
    logprobs            l l l l          l l l      over the sampled tokens, as are the version spans

Decoding checks all rules of message_invariants.py, so the services do not check them again.
"""

import contextlib
from typing import Any, Final, Literal, TypeVar

import msgspec

from shared.arrays import ID_DTYPE, LOGPROB_DTYPE, Ids, Logprobs, unpack_ids, unpack_logprobs, unpack_mask
from shared.errors import MessageError
from shared.message_invariants import (
    Count,
    Finite,
    GroupId,
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

SCHEMA_VERSION = 2
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

CallOutcome = Literal["scored", "not_applicable", "timeout", "invalid", "overload", "error"]
"""How a call of a reward function ended, for one completion."""
Outcome = Literal[CallOutcome, "lost"]
"""``lost``: the rollout could not be played to its end, so no function was called with it."""
Prompt = str | list[dict[str, str]]
"""TRL's two formats: plain text, or a conversation of ``{"role": ..., "content": ...}``."""
RETURNED_LIST: Final = "returned_list"
"""Key of a tool message for the list that the tool returned. ``content`` is the text that the model reads."""
Completion = str | list[dict[str, Any]]
"""The decoded text, or the messages that follow the prompt, in OpenAI's format."""


def is_failure(outcome: Outcome) -> bool:
    """Return whether an outcome means that a completion should have been scored and could not be."""
    return outcome not in ("scored", "not_applicable")


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """A range ``[start, end)`` of a row's sampled tokens, with the policy version that sampled them.

    ``incarnation`` is the incarnation of the trainer that pushed the version (lineage.py); 0 if it is unknown.
    """

    policy_version: Version
    start: Count
    end: Count
    incarnation: Incarnation = 0


class Turn(msgspec.Struct, frozen=True):
    """One turn over ``token_ids[start:end]`` of a row; times are Unix seconds."""

    role: str
    start: Count
    end: Count
    finish_reason: str | None
    started_at_s: Seconds
    ended_at_s: Seconds


class RewardOutcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one reward function for one completion. Only ``scored`` has a value.

    ``components`` are the parts of the value, if the function reports them. ``version`` identifies the function: the
    same code, or the same endpoint, has the same version. It is empty if unknown. ``metrics`` are the values that it
    logged with TRL's ``log_metric``, the same for the whole group; ``extra`` are this completion's from ``log_extra``.
    """

    name: Name
    outcome: Outcome
    value: Finite | None
    weight: Finite
    detail: str = ""
    latency_s: Seconds = 0.0
    components: dict[str, Finite] = {}
    version: str = ""
    metrics: dict[str, Finite] = {}
    extra: dict[str, str | Finite] = {}


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """An event in a group's life, with its time (Unix seconds) and the replica that caused it."""

    event: str
    at_s: Seconds
    by: str


class Row(msgspec.Struct, frozen=True):
    """One sequence of tokens that the policy read and sampled, as packed arrays (arrays.py)."""

    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.logprobs) // LOGPROB_DTYPE.itemsize

    @property
    def num_prompt(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.loss_mask.index(1)

    def sampled_ids(self) -> Ids:
        """Return the sampled token ids, in order."""
        sampled: Ids = unpack_ids(self.token_ids)[unpack_mask(self.loss_mask) == 1]
        return sampled

    def packed_completion_ids(self) -> bytes:
        """Return the token ids from the first sampled one on, still packed as int32 bytes."""
        return self.token_ids[ID_DTYPE.itemsize * self.num_prompt :]

    def generator_logprobs(self) -> Logprobs:
        """Return log p of each sampled token under the distribution it was sampled from, in nats; NaN means unknown."""
        return unpack_logprobs(self.logprobs)


class PlayedEnvironment(msgspec.Struct, frozen=True):
    """The environment of a rollout, or its agent program, as it was at the end of the rollout.

    ``name`` names its type, such as ``module:Class``. ``observation`` is the text that its ``reset`` appended to the
    prompt. ``reward`` is the result of its ``get_reward``, or the reward that the agent program reported.
    ``attributes`` are its public attributes, and ``left_out`` has the reason for each attribute that is missing.
    """

    name: Name
    has_reward: bool
    observation: str = ""
    reward: Finite | None = None
    attributes: dict[str, Any] = {}
    left_out: dict[str, str] = {}


class Rollout(msgspec.Struct, frozen=True):
    """One prompt with one completion and, once scored, its rewards, which belong to all of its rows.

    ``completion`` is the decoded text of the sampled tokens without special tokens, or the messages that follow the
    prompt. ``lost`` is the reason why the rollout could not be played to its end; empty for all others.
    """

    rollout_id: Name
    group_id: str
    branch: Count
    rows: tuple[Row, ...]
    completion: Completion
    rewards: tuple[RewardOutcome, ...] = ()
    lost: str = ""
    tool_calls: Count = 0
    tool_failures: Count = 0
    environment: PlayedEnvironment | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled, in all rows."""
        return sum(row.num_sampled for row in self.rows)

    def version_spans(self) -> list[VersionSpan]:
        """Return the spans over the sampled tokens of all rows, one row after the other."""
        spans: list[VersionSpan] = []
        for row in self.rows:
            before = spans[-1].end if spans else 0
            spans += [
                VersionSpan(span.policy_version, before + span.start, before + span.end, span.incarnation)
                for span in row.version_spans
            ]
        return spans

    def packed_completion_ids(self) -> bytes:
        """Return each row's packed token ids from its first sampled one on; with one row, TRL's ``completion_ids``."""
        return b"".join([row.packed_completion_ids() for row in self.rows])

    def is_truncated(self) -> bool:
        """Return whether a length limit cut the rollout's last turn, which is not always a turn of its last row."""
        last_turns = [row.turns[-1] for row in reversed(self.rows)]  # of two that ended together, the later row's
        return bool(last_turns) and max(last_turns, key=lambda turn: turn.ended_at_s).finish_reason == "length"


class PromptGroup(msgspec.Struct, frozen=True, tag="prompt_group"):
    """A prompt to be completed ``num_generations`` times.

    ``group_id`` is the admission number in decimal (``"00000042"``): a position in the dataset has one id, so
    re-reading the dataset admits nothing twice. Ids of evaluation groups are not numbers
    (``"eval-0001-00000010-00000003"``); generators and rewarders treat these groups like all others. ``columns``
    contains every other column of the dataset row. ``prompt_ids`` is empty if the session that plays the rollouts
    renders the prompt.
    """

    run_id: Name
    group_id: GroupId
    prompt: Prompt
    prompt_ids: bytes
    columns: dict[str, Any]
    num_generations: NumGenerations
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION


def with_observation(prompt: Prompt, observation: str) -> Prompt:
    """Return the prompt with a text at the end of its last message, as TRL appends what ``reset`` returned.

    Raises:
        MessageError: The last message has no text.
    """
    if isinstance(prompt, str):
        return prompt + observation
    if not prompt or "content" not in prompt[-1]:
        raise MessageError("the prompt has no last message with text, to which its environment's could be appended")
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + observation}]


def prompt_of(rollout: Rollout, group: PromptGroup) -> Prompt:
    """Return the prompt of one rollout: its group's prompt, with the observation of its own environment at the end."""
    if rollout.environment is None:
        return group.prompt
    return with_observation(group.prompt, rollout.environment.observation)


class CompletedGroup(msgspec.Struct, frozen=True, tag="completed_group"):
    """A whole group with its completions, not scored yet."""

    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION


class ScoredGroup(msgspec.Struct, frozen=True, tag="scored_group"):
    """A whole group with its completions. Every rollout has one outcome for each reward function of the run."""

    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]
    stamps: tuple[Stamp, ...] = ()
    schema_version: int = SCHEMA_VERSION


Group = PromptGroup | CompletedGroup | ScoredGroup
_GroupT = TypeVar("_GroupT", PromptGroup, CompletedGroup, ScoredGroup)


_decoder: msgspec.msgpack.Decoder[Group] = msgspec.msgpack.Decoder(Group)
"""Decodes all kinds. A msgspec decoder for one kind would accept a message that does not name its kind."""


class _Head(msgspec.Struct):
    """The schema version of a message, which can be decoded even if the other fields cannot."""

    schema_version: int


def oldest_policy_version(group: CompletedGroup | ScoredGroup) -> int:
    """Return the policy version of the oldest sampled token in a group; 0 if none was sampled."""
    rows = (row for rollout in group.rollouts for row in rollout.rows)
    return min((span.policy_version for row in rows for span in row.version_spans), default=0)


def encode(group: Group) -> bytes:
    """Return the group as the msgpack payload of a stream entry.

    Raises:
        MessageError: The group is too large, or has a value that msgpack cannot carry (lone surrogate, unknown type).
    """
    try:
        data = msgspec.msgpack.encode(group)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"the group cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"the group takes {len(data)} bytes, more than the {MAX_MESSAGE_BYTES} a stream entry may")
    return data


def decode_prompt_group(data: bytes) -> PromptGroup:
    """Decode a prompt group. Raises MessageError if it is malformed or breaks a rule of message_invariants.py."""
    group = _decode(data, PromptGroup)
    check_prompt(group)
    return group


def decode_completed_group(data: bytes) -> CompletedGroup:
    """Decode a completed group. Raises MessageError if it is malformed or breaks a rule of message_invariants.py."""
    group = _decode(data, CompletedGroup)
    check_rollouts(group.prompt, group.rollouts)
    check_unscored(group.rollouts)
    return group


def decode_scored_group(data: bytes) -> ScoredGroup:
    """Decode a scored group. Raises MessageError if it is malformed or breaks a rule of message_invariants.py."""
    group = _decode(data, ScoredGroup)
    check_rollouts(group.prompt, group.rollouts)
    check_rewards(group.rollouts)
    return group


def require_place(prompt: PromptGroup, *, run_id: str, label: str) -> None:
    """Raise MessageError unless a group's id and run match the label and the stream of the entry that holds it."""
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
