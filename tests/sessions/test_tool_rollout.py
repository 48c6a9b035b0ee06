"""One rollout with tools, as TRL's loop plays it, with scripted turns."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.sessions.recording.recorded import Entry
from services.sessions.session import Session
from services.sessions.session_store import SessionFullError
from services.sessions.tool_rollout import Limits, ToolRollout, play
from services.sessions.tools.tool_answer import ListResult
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.arrays import pack_ids, unpack_ids
from shared.messages import RETURNED_LIST
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError, TurnRequest
from tests.sessions.scripted import (
    InProcessTools,
    ScriptedGenerators,
    answer,
    assistant,
    call,
    rendered,
    sampled,
    turns_of,
    user,
)

pytestmark = pytest.mark.unit

PROMPT = [user("2+2?")]
NO_LIMIT = Limits(max_iterations=None, max_completion_length=100)
CALL = assistant("", call("add", '{"a": 2, "b": 2}'))
Policy = Callable[[TurnRequest], ChatMessage | SampledTurn]


def add(a: int, b: int) -> int:
    return a + b


def tool_message(name: str, content: str, call_id: str = "call-0") -> ChatMessage:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


class Play:
    """Plays one rollout and keeps everything that took part in it."""

    def __init__(self, policy: Policy, *, entries: Sequence[Entry] = (), **functions: Callable[..., Any]) -> None:
        self.generators = ScriptedGenerators(policy)
        self.tools = InProcessTools(**(functions or {"add": add}))
        self.entries = list(entries)
        self.session = Session(
            "00000000-0", run_id="run-test", generators=self.generators, record=self.record, entries=entries
        )

    async def record(self, number: int, entry: Entry) -> None:
        assert number == len(self.entries)
        self.entries.append(entry)

    async def __call__(self, limits: Limits = NO_LIMIT) -> ToolRollout:
        async with asyncio.timeout(60):
            return await play(self.session, PROMPT, tools=self.tools, limits=limits)


async def test_without_a_call_the_rollout_is_one_turn() -> None:
    playing = Play(turns_of(assistant("4")))
    assert await playing() == ToolRollout([assistant("4")])
    (request,) = playing.generators.requests
    assert (request.max_tokens, request.max_row_tokens, request.tools) == (100, 0, playing.tools.schemas)


async def test_a_call_is_answered_and_the_turns_make_one_row() -> None:
    playing = Play(turns_of(CALL, assistant("4")))
    rollout = await playing()
    assert rollout == ToolRollout([CALL, tool_message("add", "4"), assistant("4")], num_calls=1)
    (row,) = playing.session.recording.rows()
    prompt, suffix = rendered(PROMPT), rendered([tool_message("add", "4")])
    assert unpack_ids(row.token_ids).tolist() == [*prompt, 11, 12, *suffix, 11, 12]
    assert list(row.loss_mask) == [0] * len(prompt) + [1, 1] + [0] * len(suffix) + [1, 1]
    _, second = playing.generators.requests
    assert second.recorded_ids == pack_ids([*prompt, 11, 12])
    assert second.max_row_tokens == len(prompt) + 100


async def test_a_list_is_text_for_the_model_and_a_list_for_reward_functions() -> None:
    playing = Play(
        turns_of(assistant("", call("rows", "{}")), assistant("", call("rows", "{}")), assistant("done")),
        rows=lambda: ListResult("[('a', 1)]", [["a", 1]]),
    )
    rollout = await playing()
    shown = tool_message("rows", "[('a', 1)]")
    assert rollout.completion[1] == rollout.completion[3] == shown | {RETURNED_LIST: [["a", 1]]}
    assert rollout.num_calls == 2
    (row,) = playing.session.recording.rows()
    suffix = rendered([shown])
    assert unpack_ids(row.token_ids).tolist() == [*rendered(PROMPT), *([11, 12, *suffix] * 2), 11, 12]


async def test_calls_of_one_message_run_at_the_same_time_and_are_answered_in_their_order() -> None:
    together = asyncio.Barrier(2)

    async def slow(x: int) -> int:
        await together.wait()
        await asyncio.sleep(0.02 if x == 1 else 0.0)
        return x

    calls = [call("slow", f'{{"x": {x}}}', f"call-{x}") for x in (1, 2)]
    rollout = await Play(turns_of(assistant("", *calls), assistant("done")), slow=slow)()
    assert rollout.completion[1:3] == [tool_message("slow", "1", "call-1"), tool_message("slow", "2", "call-2")]
    assert (rollout.num_calls, rollout.num_failed) == (2, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bad", "{}", "{'error': 'no such city'}"),
        ("missing", "{}", "{'error': 'Tool missing not found.'}"),
        ("bad", "[1]", "{'error': 'the arguments are not a JSON object'}"),
        ("bad", '{"a":' + "[" * 300 + "]" * 300 + "}", "{'error': 'the arguments are nested deeper than 100 levels'}"),
        ("bad", '{"a', "{'error': 'the arguments are not JSON: Unterminated string starting at: line 1 column 2"),
    ],
)
async def test_a_failing_call_is_answered_with_its_error_and_counted(name: str, arguments: str, said: str) -> None:
    def bad() -> None:
        raise ToolError("no such city")

    rollout = await Play(turns_of(assistant("", call(name, arguments)), assistant("sorry")), bad=bad)()
    assert rollout.completion[1]["content"].startswith(said)
    assert rollout.completion[2] == assistant("sorry")
    assert (rollout.num_calls, rollout.num_failed, rollout.lost) == (1, 1, "")


@pytest.mark.parametrize("most", [1, 2])
async def test_the_calls_of_the_turn_after_the_last_iteration_are_not_run(most: int) -> None:
    playing = Play(lambda _: CALL)
    rollout = await playing(Limits(max_iterations=most, max_completion_length=100))
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool"] * most + ["assistant"]
    assert len(playing.tools.calls) == most


async def test_results_without_room_for_another_turn_are_dropped() -> None:
    def policy(request: TurnRequest) -> ChatMessage:
        if request.num_recorded_messages:
            raise TurnRefusedError("full", kind="context_length")
        return CALL

    playing = Play(policy)
    assert await playing() == ToolRollout([CALL], num_calls=1)
    assert len(playing.session.recording.rows()) == 1


async def test_the_calls_of_a_turn_that_was_cut_are_not_run() -> None:
    playing = Play(lambda _: sampled(CALL, finish_reason="length"))
    assert await playing() == ToolRollout([CALL])
    assert playing.tools.calls == []


@pytest.mark.parametrize("kind", ["chat_template", "malformed", "sampling"])
async def test_any_other_refusal_of_a_later_turn_loses_the_rollout(kind: Any) -> None:
    def policy(request: TurnRequest) -> ChatMessage:
        if request.num_recorded_messages:
            raise TurnRefusedError("only one call at a time", kind=kind)
        return CALL

    playing = Play(policy)
    assert await playing() == ToolRollout([CALL], num_calls=1, lost="its turn 2 was refused: only one call at a time")
    assert len(playing.session.recording.rows()) == 1


@pytest.mark.parametrize("kind", ["context_length", "chat_template", "malformed", "sampling"])
async def test_a_refusal_of_the_first_turn_is_an_error(kind: Any) -> None:
    def policy(_: TurnRequest) -> ChatMessage:
        raise TurnRefusedError("no", kind=kind)

    with pytest.raises(TurnRefusedError, match="no"):
        await Play(policy)()


async def test_a_tool_that_hangs_loses_its_rollout_and_cancels_the_other_calls() -> None:
    cancelled = asyncio.Event()

    async def hang(fails: bool) -> None:
        try:
            await asyncio.sleep(0.01 if fails else 60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise ToolLostError("hang did not end within 30 s")

    both = [call("hang", '{"fails": false}'), call("hang", '{"fails": true}')]
    playing = Play(turns_of(assistant("", *both)), hang=hang)
    rollout = await playing()
    assert rollout.lost == "hang did not end within 30 s"
    assert rollout.completion == [assistant("", *both)]
    assert cancelled.is_set()


async def test_a_session_that_is_full_loses_its_rollout() -> None:
    playing = Play(turns_of(CALL, assistant("4")))

    async def refuse(number: int, entry: Entry) -> None:
        if number == 2:
            raise SessionFullError("too large")
        await playing.record(number, entry)

    playing.session = Session("0-0", run_id="run-test", generators=playing.generators, record=refuse)
    rollout = await playing()
    assert rollout.lost == "too large"
    assert len(playing.session.recording.rows()) == 1


@pytest.mark.parametrize("num_kept", range(6))
async def test_after_a_crash_nothing_that_was_recorded_is_sampled_or_run_again(num_kept: int) -> None:
    policy = turns_of(CALL, assistant("", call("add", '{"a": 4, "b": 4}', "call-1")), assistant("8"))
    first = Play(policy)
    whole = await first()
    assert len(first.entries) == 5

    def unlike_before(request: TurnRequest) -> SampledTurn:
        return answer(request, policy(request), token_ids=[21, 22])

    second = Play(unlike_before, entries=first.entries[:num_kept])
    assert await second() == whole
    assert len(second.generators.requests) == 3 - (num_kept + 1) // 2
    assert len(second.tools.calls) == 2 - num_kept // 2
    (row,) = second.session.recording.rows()
    ids = unpack_ids(row.token_ids)[[bool(sampled_here) for sampled_here in row.loss_mask]].tolist()
    num_turns = (num_kept + 1) // 2
    assert ids == [11, 12] * num_turns + [21, 22] * (3 - num_turns)


async def test_a_recording_with_other_tools_is_not_continued() -> None:
    first = Play(turns_of(CALL, assistant("4")))
    await first()
    second = Play(turns_of(CALL, assistant("4")), entries=first.entries[:2], add=add, subtract=add)
    rollout = await second()
    assert rollout.lost.startswith("its recorded turns are of other tools")
    assert rollout.completion == []
    assert not second.generators.requests
    assert not second.tools.calls
