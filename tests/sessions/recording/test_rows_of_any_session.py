"""Whatever an agent program does to its history, every sampled token is trained once, after what it was sampled after.

A program takes up any earlier conversation, writes it in its own way or rewrites it, appends messages and asks again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sessions.recording.recorded import Entry, digest
from services.sessions.recording.recording import Recording
from shared.arrays import unpack_ids, unpack_mask
from shared.messages import CompletedGroup, Rollout, VersionSpan, decode_completed_group, encode
from shared.turns import ChatMessage, TurnRequest
from tests.groups import prompt_group
from tests.sessions.scripted import answer, assistant, call, rendered, tool, user

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Step:
    """One request of the program."""

    earlier: int
    keep: int
    rewrites: int | None
    drops_ids: bool
    appends: list[ChatMessage]
    calls_tool: bool
    num_tokens: int
    tools: list[Any]


TEXTS = st.sampled_from(["a", "b"])
STEPS = st.builds(
    Step,
    earlier=st.integers(0, 5),
    keep=st.integers(0, 8),
    rewrites=st.none() | st.none() | st.integers(0, 7),
    drops_ids=st.booleans(),
    appends=st.lists(st.builds(user, TEXTS) | st.builds(tool, TEXTS), min_size=1, max_size=2),
    calls_tool=st.booleans(),
    num_tokens=st.integers(1, 3),
    tools=st.sampled_from([[], [], [{"name": "f"}]]),
)


def written_again(message: ChatMessage, *, drops_ids: bool) -> ChatMessage:
    """Return a message as a program sends it back: parsed, without reasoning, written in another way."""
    if message["role"] != "assistant":
        return message
    calls = [
        call(
            each["function"]["name"],
            json.dumps(json.loads(each["function"]["arguments"]), indent=1),
            None if drops_ids else each.get("id"),
        )
        for each in message.get("tool_calls", [])
    ]
    return assistant(f" {message['content']}\n", *calls)


def conversation_of(step: Step, earlier: Sequence[list[ChatMessage]]) -> list[ChatMessage]:
    kept = earlier[step.earlier % len(earlier)][: step.keep] if earlier else []
    messages = [written_again(message, drops_ids=step.drops_ids) for message in kept]
    if step.rewrites is not None and step.rewrites < len(messages):
        messages[step.rewrites] = messages[step.rewrites] | {"content": "rewritten"}
    return [*messages, *step.appends]


@given(st.lists(STEPS, min_size=1, max_size=8))
def test_rows_of_any_session(steps: list[Step]) -> None:
    recording, entries = Recording(), list[Entry]()
    conversations: list[list[ChatMessage]] = []
    contexts: list[tuple[list[int], list[int]]] = []  # what the engine was given, and what it sampled
    for number, step in enumerate(steps):
        messages = conversation_of(step, conversations)
        found = recording.continuation(messages, step.tools)
        request = TurnRequest(
            "run", "0", messages, step.tools, found.recorded_ids, found.num_recorded_messages, max_tokens=3
        )
        calls = [call("f", f'{{"x": {number}}}', f"call-{number}")] if step.calls_tool else []
        message = assistant(f"said {number}", *calls, reasoning="because")
        token_ids = [1000 * (number + 1) + place for place in range(step.num_tokens)]
        turn = answer(
            request,
            message,
            token_ids=token_ids,
            spans=tuple(VersionSpan(number + place, place, place + 1) for place in range(step.num_tokens)),
        )
        entry = recording.turn_after(found, request=digest(number), messages=messages, tools=step.tools, turn=turn)
        recording.add(entry)
        entries.append(msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry))
        given_to_engine = unpack_ids(request.recorded_ids).tolist() + unpack_ids(turn.appended_ids).tolist()
        contexts.append((given_to_engine, token_ids))
        conversations.append([*messages, message])
        # The recorded ids and what was rendered stand for all messages.
        assert len(given_to_engine) > found.num_recorded_messages
        assert unpack_ids(turn.appended_ids).tolist() == rendered(messages[found.num_recorded_messages :])
    rows = recording.rows()
    group = CompletedGroup(
        msgspec.structs.replace(prompt_group(num_generations=1), prompt_ids=b""),
        (Rollout("00000000-0", "00000000", 0, rows, conversations[-1]),),
    )
    assert decode_completed_group(encode(group)) == group
    assert Recording(entries).rows() == rows
    assert len(rows) == recording.num_forks + 1
    trained: list[tuple[list[int], int]] = []
    for row in rows:
        ids, mask = unpack_ids(row.token_ids).tolist(), unpack_mask(row.loss_mask)
        sampled_at = [place for place, sampled in enumerate(mask) if sampled]
        trained += [(ids[:place], ids[place]) for place in sampled_at]
        versions = [span.policy_version for span in row.version_spans for _ in range(span.start, span.end)]
        # Each token above has the version that its id says.
        assert versions == [ids[place] // 1000 - 1 + ids[place] % 1000 for place in sampled_at]
    expected = [
        ([*before, *token_ids[:place]], token_ids[place])
        for before, token_ids in contexts
        for place in range(len(token_ids))
    ]
    assert sorted(trained) == sorted(expected)


@given(st.lists(STEPS, min_size=1, max_size=6), st.booleans())
def test_a_history_that_is_not_rewritten_is_continued_where_it_ended(steps: list[Step], drops_ids: bool) -> None:
    recording = Recording()
    history: list[ChatMessage] = []
    for number, step in enumerate(steps):
        messages = [*(written_again(each, drops_ids=drops_ids) for each in history), *step.appends]
        found = recording.continuation(messages, [])
        assert (found.num_recorded_messages, found.is_rewritten) == (len(history), False)
        calls = [call("f", f'{{"x": {number}}}', f"call-{number}")] if step.calls_tool else []
        message = assistant(f"said {number}", *calls, reasoning="because")
        request = TurnRequest("run", "0", messages, [], found.recorded_ids, found.num_recorded_messages, max_tokens=3)
        recording.add(
            recording.turn_after(
                found, request=digest(number), messages=messages, tools=[], turn=answer(request, message)
            )
        )
        history = [*messages, message]
    assert len(recording.rows()) == 1
