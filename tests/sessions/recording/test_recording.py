"""Rows of a session's turns, computed by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.sessions.recording import recording
from services.sessions.recording.recorded import Entry, RecordedTurn, ToolResults, digest
from services.sessions.recording.recording import Continuation, Recording
from shared.arrays import pack_ids, unpack_ids
from shared.messages import Row, Turn, VersionSpan
from shared.turns import ChatMessage
from tests.sessions.scripted import assistant, call, sampled, tool, user

pytestmark = pytest.mark.unit

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1, "b": True}}}]
QUESTION = [{"role": "system", "content": "Be brief."}, user("2+2?")]
CALL = assistant("", call("add", '{"a":2,"b":2}'))


class Session:
    """A recording and the entries that it was made of."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.entries: list[Entry] = []

    def ask(
        self, messages: Sequence[ChatMessage], message: ChatMessage, *, tools: Sequence[Any] = TOOLS, **turn: Any
    ) -> Continuation:
        """Record a turn for a request, and return what it continued."""
        found = self.recording.continuation(messages, tools)
        entry = self.recording.turn_after(
            found, request=digest(list(messages)), messages=messages, tools=tools, turn=sampled(message, **turn)
        )
        self.recording.add(entry)
        self.entries.append(entry)
        return found


@pytest.fixture
def session() -> Session:
    """Return a session that has asked one question, which the policy answered with a tool call."""
    session = Session()
    assert session.ask(QUESTION, CALL, appended_ids=[1, 2, 3], token_ids=[11, 12]) == Continuation()
    return session


def ids(row: Row) -> list[int]:
    return [int(each) for each in unpack_ids(row.token_ids)]


def test_a_single_turn_is_the_row_of_a_plain_completion(session: Session) -> None:
    (row,) = session.recording.rows()
    assert ids(row) == [1, 2, 3, 11, 12]
    assert list(row.loss_mask) == [0, 0, 0, 1, 1]
    assert row.turns == (Turn("assistant", 3, 5, "stop", 10.0, 11.0),)


def test_a_tool_result_is_appended_to_the_row_and_is_not_sampled(session: Session) -> None:
    asked = [*QUESTION, assistant(" ", call("add", '{"b": 2, "a": 2}')), tool("4")]
    found = session.ask(
        asked,
        assistant("4"),
        appended_ids=[4, 5],
        token_ids=[13, 14, 15],
        at_s=20.0,
        spans=(VersionSpan(3, 0, 1, 1), VersionSpan(4, 1, 3, 1)),
    )
    assert found == Continuation(turn=0, recorded_ids=pack_ids([1, 2, 3, 11, 12]), num_recorded_messages=3)
    (row,) = session.recording.rows()
    assert ids(row) == [1, 2, 3, 11, 12, 4, 5, 13, 14, 15]
    assert list(row.loss_mask) == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert row.version_spans == (VersionSpan(3, 0, 2, 1), VersionSpan(3, 2, 3, 1), VersionSpan(4, 3, 5, 1))
    assert row.turns == (
        Turn("assistant", 3, 5, "stop", 10.0, 11.0),
        Turn("tool", 5, 7, None, 11.0, 20.0),
        Turn("assistant", 7, 10, "stop", 20.0, 21.0),
    )
    assert (session.recording.num_forks, session.recording.num_drifted_tokens) == (0, 0)


def test_a_second_answer_to_an_earlier_turn_begins_a_row_whose_shared_tokens_do_not_count_again(
    session: Session,
) -> None:
    session.ask([*QUESTION, CALL, tool("4")], assistant("4"), appended_ids=[4], token_ids=[13])
    found = session.ask([*QUESTION, CALL, tool("five")], assistant("5"), appended_ids=[5], token_ids=[14, 15])
    assert (found.turn, found.is_rewritten) == (0, False)
    first, second = session.recording.rows()
    assert ids(first) == [1, 2, 3, 11, 12, 4, 13]
    assert ids(second) == [1, 2, 3, 11, 12, 5, 14, 15]
    assert list(second.loss_mask) == [0, 0, 0, 0, 0, 0, 1, 1]
    assert second.version_spans == (VersionSpan(3, 0, 2, 1),)
    assert [(turn.role, turn.start, turn.end) for turn in second.turns] == [("assistant", 6, 8)]
    assert (session.recording.num_forks, session.recording.num_drifted_tokens) == (1, 0)


def test_a_fork_says_how_many_tokens_its_row_repeats(session: Session) -> None:
    session.ask([*QUESTION, CALL, tool("4")], assistant("4"), appended_ids=[4], token_ids=[13])
    session.ask([*QUESTION, CALL, tool("five")], assistant("5"), appended_ids=[5], token_ids=[14])
    session.ask([user("Plan.")], assistant("Done."))
    repeated = [entry.num_repeated_tokens for entry in session.entries if isinstance(entry, RecordedTurn)]
    assert repeated == [0, 0, 5, 0]
    rows = session.recording.rows()
    assert sum(len(row.loss_mask) for row in rows) == 5 + 2 + 2 + 5 + sum(repeated)


@pytest.mark.parametrize(
    "changed",
    [
        user("2+2? "),
        user("2+2?") | {"name": "Ann"},
        user("2+2?") | {"documents": ["d"]},
        user("2+2?") | {"content": [{"type": "text", "text": "2+2?"}]},
    ],
)
def test_a_message_that_the_client_wrote_and_changed_begins_another_conversation(
    session: Session, changed: ChatMessage
) -> None:
    asked = [QUESTION[0], changed, CALL, tool("4")]
    assert session.recording.continuation(asked, TOOLS).turn is None
    assert session.recording.continuation([*QUESTION, CALL, tool("4")], TOOLS).turn == 0


def test_an_example_with_other_reasoning_begins_another_conversation() -> None:
    session = Session()
    example = [user("1+1?"), assistant("2", reasoning_content="one and one")]
    session.ask([*example, *QUESTION], CALL)
    assert session.recording.continuation([*example, *QUESTION, CALL, tool("4")], TOOLS).turn == 0
    example[1] = assistant("2", reasoning_content="I know this")
    assert session.recording.continuation([*example, *QUESTION, CALL, tool("4")], TOOLS).turn is None


def test_a_message_that_came_back_before_is_not_parsed_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten = [*QUESTION, assistant(" ", call("add", '{"b": 2, "a": 2}')), tool("4")]
    assert session.recording.continuation(rewritten, TOOLS).turn == 0
    monkeypatch.setattr(recording, "comparable", None)
    assert session.recording.continuation(rewritten, TOOLS).turn == 0


def test_a_row_grows_on_after_a_fork(session: Session) -> None:
    session.ask([*QUESTION, CALL, tool("4")], assistant("4"), appended_ids=[4], token_ids=[13])
    session.ask([*QUESTION, CALL, tool("five")], assistant("5"), appended_ids=[5], token_ids=[14])
    found = session.ask([*QUESTION, CALL, tool("4"), assistant("4"), user("sure?")], assistant("yes"), token_ids=[15])
    assert found.turn == 1
    first, second = session.recording.rows()
    assert ids(first) == [1, 2, 3, 11, 12, 4, 13, 1, 2, 3, 15]
    assert ids(second) == [1, 2, 3, 11, 12, 5, 14]


def test_a_rewritten_answer_begins_a_row_and_its_tokens_drift(session: Session) -> None:
    asked = [*QUESTION, assistant("Calling tools: add"), tool("4")]
    found = session.ask(asked, assistant("4"), appended_ids=[1, 2, 3, 9, 9, 4], token_ids=[13])
    assert found == Continuation(is_rewritten=True)
    assert [list(row.loss_mask) for row in session.recording.rows()] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert (session.recording.num_forks, session.recording.num_drifted_tokens) == (1, 6)


def test_an_answer_that_was_rewritten_later_keeps_the_ids_before_it(session: Session) -> None:
    session.ask([*QUESTION, CALL, tool("4")], assistant("four"), appended_ids=[4], token_ids=[13])
    asked = [*QUESTION, CALL, tool("4"), assistant("4"), user("sure?")]
    found = session.ask(asked, assistant("yes"), appended_ids=[4, 9, 6], token_ids=[14])
    assert (found.turn, found.num_recorded_messages, found.is_rewritten) == (0, 3, True)
    assert session.recording.num_drifted_tokens == 3
    assert ids(session.recording.rows()[1]) == [1, 2, 3, 11, 12, 4, 9, 6, 14]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([*QUESTION, CALL, tool("4")], []),  # other tools render to another prompt
        ([user("Summary: 2+2 was asked.")], TOOLS),  # a compacted history
        ([user("You are a planner."), assistant("Fine."), user("Plan.")], TOOLS),  # a sub-agent, with an example
        (QUESTION, TOOLS),  # the question again
    ],
)
def test_another_conversation_begins_a_row_and_is_not_drift(
    session: Session, messages: list[ChatMessage], tools: list[Any]
) -> None:
    assert session.ask(messages, assistant("4"), tools=tools) == Continuation()
    assert len(session.recording.rows()) == 2
    assert (session.recording.num_forks, session.recording.num_drifted_tokens) == (1, 0)


def test_of_two_equal_conversations_the_one_that_nothing_continues_yet_is_continued(session: Session) -> None:
    session.ask([*QUESTION, user("again")], assistant("other"))
    session.ask(QUESTION, CALL, token_ids=[21])
    session.ask([*QUESTION, CALL, tool("4")], assistant("4"))
    assert session.recording.continuation([*QUESTION, CALL, tool("4 ")], TOOLS).turn == 0


def test_a_repeated_request_has_the_recorded_turn(session: Session) -> None:
    repeated = session.recording.repeated(digest(QUESTION))
    assert repeated is not None
    assert repeated.message == CALL
    assert session.recording.repeated(digest([*QUESTION, CALL])) is None


def test_the_digest_of_a_body_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert digest({"a": 1, "b": [True]}) == digest({"b": [True], "a": 1})
    assert len({digest([True]), digest([1]), digest([[True]]), digest(["1"]), digest([None])}) == 5


def test_a_recording_is_made_again_from_its_entries(session: Session) -> None:
    session.ask([*QUESTION, CALL, tool("4")], assistant("4"), appended_ids=[4], token_ids=[13])
    session.ask([*QUESTION, CALL, tool("five")], assistant("5"), appended_ids=[5], token_ids=[14])
    results = ToolResults(0, [tool("4")], 0)
    again = Recording([*session.entries, results])
    assert again.rows() == session.recording.rows()
    assert again.num_entries == 4
    assert again.tool_results(0) == results
    assert again.tool_results(1) is None
