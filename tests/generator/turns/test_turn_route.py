"""``POST /internal/v1/turns``: what the engine is given, what is refused and how, and when turns end early."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from services.generator.engine.engine import EngineDiedError
from services.generator.engine.output_gate import UnverifiedError
from services.generator.rollouts import SampledCompletion
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulated_chat_format import SimulatedChatFormat
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.turns import turn_sampler
from services.generator.turns.turn_sampler import TurnSampler
from shared.arrays import unpack_ids, unpack_logprobs
from shared.errors import MessageError, UnavailableError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.messages import VersionSpan
from shared.turns import TURN_PATH, ChatMessage, decode_turn_answer
from tests.generator.turns.turn_rig import CONFIG, QUESTION, CommandedEngine, RawClient, Rig, sampled, turn, until

pytestmark = pytest.mark.unit


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with rig.client:
        yield rig


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    return body["status"], body["kind"], body["detail"]


async def test_the_engine_continues_exactly_what_was_recorded(rig: Rig) -> None:
    engine = CommandedEngine(sampled(3), sampled(2, "length"))
    with rig.serving(engine):
        first = await rig.turn(turn(QUESTION))
        assert unpack_ids(first.appended_ids).tolist() == [4]
        assert unpack_ids(first.token_ids).tolist() == [40, 41, 42]
        assert unpack_logprobs(first.logprobs).tolist() == [-0.5] * 3
        assert first.version_spans == (VersionSpan(7, 0, 3, incarnation=2),)
        assert (first.finish_reason, first.message) == ("stop", {"role": "assistant", "content": "3 tokens"})
        assert 0 < first.started_at_s <= first.ended_at_s

        recorded = first.appended_ids + first.token_ids
        rewritten = {"role": "assistant", "content": "other text"}
        follow: ChatMessage = {"role": "tool", "content": "2"}
        second = await rig.turn(
            turn(QUESTION, rewritten, follow, recorded_ids=recorded, num_recorded_messages=2, request_id="r2")
        )
    assert unpack_ids(second.appended_ids).tolist() == [1]
    assert second.finish_reason == "length"
    assert engine.asked == [("run-1-r1", [4], 20), ("run-1-r2", [4, 40, 41, 42, 1], 20)]
    assert rig.metrics.registry.get_sample_value("headrace_generated_tokens_total") == 5


async def test_a_turn_has_as_many_tokens_as_the_request_the_run_and_the_context_allow(rig: Rig) -> None:
    engine = CommandedEngine(*[sampled()] * 6)
    with rig.serving(engine):
        for max_tokens, longest, row in ((0, 100, 0), (7, 100, 0), (30, 100, 0), (7, 6, 0), (7, 6, 5), (0, None, 9)):
            engine.max_model_len = longest
            await rig.turn(turn(QUESTION, QUESTION, max_tokens=max_tokens, max_row_tokens=row))
    assert [most for _, _, most in engine.asked] == [20, 7, 20, 4, 3, 7]


async def test_a_conversation_that_fills_the_context_is_refused_and_nothing_is_sampled(rig: Rig) -> None:
    engine = CommandedEngine()
    engine.max_model_len = 2
    with rig.serving(engine):
        kind, reason = await rig.refused(turn(QUESTION, QUESTION))
    assert kind == "context_length"
    assert "has 2 tokens, and the context of the model 2" in reason
    assert not engine.asked


async def test_a_conversation_that_fills_its_row_is_refused_too(rig: Rig) -> None:
    with rig.serving(CommandedEngine()):
        kind, reason = await rig.refused(turn(QUESTION, QUESTION, max_row_tokens=2))
    assert kind == "context_length"
    assert "has 2 tokens, and the rollout 2" in reason


async def test_what_the_template_or_the_engine_refuses_is_no_error_of_the_service(rig: Rig) -> None:
    infinite = SampledCompletion("", [40], [float("-inf")], [("2:7", 0, 1)], "stop")
    engine = CommandedEngine(MessageError("token id 9999 is out of vocabulary"), infinite)
    with rig.serving(engine):
        assert await rig.refused(turn({"role": "system", "content": "x"})) == (
            "chat_template", "the template takes no system message",
        )  # fmt: skip
        assert await rig.refused(turn(QUESTION)) == ("sampling", "token id 9999 is out of vocabulary")
        kind, reason = await rig.refused(turn(QUESTION))
    assert kind == "sampling"
    assert "turn r1 has an infinite logprob" in reason


async def test_the_turns_of_one_request_are_completions_of_one_prompt_that_is_rendered_once(rig: Rig) -> None:
    infinite = SampledCompletion("", [40], [float("-inf")], [("2:7", 0, 1)], "stop")
    engine = CommandedEngine([sampled(3), infinite, sampled(2)])
    with rig.serving(engine):
        answers = await rig.answers(turn(QUESTION, n=3))
    assert engine.asked == [("run-1-r1", [4], 20)]
    assert rig.format.num_rendered == 1
    contents = [answer.turn and answer.turn.message["content"] for answer in answers]
    assert contents == ["3 tokens", None, "2 tokens"]
    assert answers[1].refusal is not None
    assert answers[1].refusal.kind == "sampling"
    assert [answer.index for answer in answers] == [0, 0, 0]


async def test_a_refusal_of_a_request_is_a_line_for_each_of_its_turns_and_leaves_the_others_alone(rig: Rig) -> None:
    with rig.serving(CommandedEngine(sampled())):
        answers = await rig.answers(turn({"role": "system", "content": "x"}, n=2), turn(QUESTION))
    kinds = sorted((answer.index, answer.refusal.kind if answer.refusal else "") for answer in answers)
    assert kinds == [(0, "chat_template"), (0, "chat_template"), (1, "")]


async def test_each_turn_is_sent_as_soon_as_it_is_there(rig: Rig) -> None:
    engine = CommandedEngine(None, sampled())
    client = RawClient(rig, turn(QUESTION, request_id="slow"), turn(QUESTION, request_id="fast"))
    with rig.serving(engine):
        async with client.asking():
            await until(lambda: client.lines)
            assert [decode_turn_answer(line).index for line in client.lines] == [1]
    assert engine.aborted == ["run-1-slow"]


async def test_a_replica_that_does_not_serve_the_run_says_so(rig: Rig) -> None:
    idle = await rig.ask(turn(QUESTION))
    assert (idle.status_code, idle.headers["retry-after"]) == (503, "1")
    with rig.serving(CommandedEngine()):
        status, kind, detail = refusal(await rig.ask(turn(QUESTION, run_id="run-2")))
        assert (status, kind) == (409, "another_run")
        assert "serves run run-1, not run-2" in detail
        rig.state.required_version = LineageVersion(2, 8)
        stale = await rig.ask(turn(QUESTION), turn(QUESTION))
        assert (stale.status_code, stale.headers["retry-after"]) == (503, "1")
        assert "waiting for weights" in stale.json()["detail"]


async def test_a_turn_that_was_accepted_does_not_wait_for_weights_that_the_replica_may_never_get(rig: Rig) -> None:
    with rig.serving(CommandedEngine(sampled())):
        rig.format.may_render.clear()
        asking = asyncio.create_task(rig.turn(turn(QUESTION)))
        await until(lambda: rig.format.threads)
        rig.state.required_version = LineageVersion(2, 8)
        rig.format.may_render.set()
        assert (await asyncio.wait_for(asking, 120)).finish_reason == "stop"


HEAD = b'[{"run_id": "r", "request_id": "r", "messages": '


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(b"[{\xff", "malformed", id="not JSON"),
        pytest.param(HEAD + b'[{"x": ' + b"[" * 100_000, "recursion", id="nested too deeply"),
        pytest.param(b'[{"run_id": "r"}]', "request_id", id="a field is missing"),
        pytest.param(HEAD + b"[]}]", "0 messages", id="no message"),
        pytest.param(HEAD + b'["x"]}]', "messages", id="a message that is text"),
        pytest.param(HEAD + b'[{}], "num_recorded_messages": 1}]', "0 bytes", id="no recorded ids"),
        pytest.param(HEAD + b'[{}], "recorded_ids": "AAAA"}]', "3 bytes", id="a part of an id"),
        pytest.param(
            HEAD + b'[{}], "recorded_ids": "AAAAAA==", "num_recorded_messages": 1}]',
            "is not an assistant's",
            id="a recorded message that was not sampled",
        ),
        pytest.param(
            HEAD + b'[{"role": "assistant"}], "recorded_ids": "/////w==", "num_recorded_messages": 1}]',
            "negative",
            id="a negative id",
        ),
        pytest.param(b"[]", "empty", id="no request"),
        pytest.param(HEAD + b'[{}], "n": 0}]', "n", id="no turn"),
        pytest.param(
            HEAD + b"[{}]}, " + HEAD[1:].replace(b'"r"', b'"s"') + b"[{}]}]", "request 1 is of another", id="two runs"
        ),
        pytest.param(HEAD + b"[{}]}, " + HEAD[1:] + b"[]}]", "request 1: there are 0", id="a wrong second request"),
    ],
)
async def test_a_malformed_body_is_a_problem_that_says_what_is_wrong(rig: Rig, body: bytes, reason: str) -> None:
    with rig.serving(CommandedEngine()):
        answer = await rig.client.post(TURN_PATH, content=body)
    status, kind, detail = refusal(answer)
    assert (status, kind) == (422, "malformed")
    assert reason in detail


async def test_a_turn_under_weights_that_are_refused_is_sampled_again(rig: Rig) -> None:
    engine = CommandedEngine(UnverifiedError("its weights failed their probe"), sampled())
    with rig.serving(engine):
        assert unpack_ids((await rig.turn(turn(QUESTION))).token_ids).tolist() == [40, 41, 42]
    assert [request_id for request_id, _, _ in engine.asked] == ["run-1-r1", "run-1-r1-again-1"]


async def test_a_turn_on_which_the_engine_fails_may_be_asked_for_again(rig: Rig) -> None:
    with rig.serving(CommandedEngine(EngineDiedError("vLLM's engine failed"), UnavailableError("the run is over"))):
        for reason in ("vLLM's engine failed", "the run is over"):
            assert await rig.refused(turn(QUESTION)) == ("unavailable", reason)


async def test_an_error_of_the_generator_is_logged_and_costs_one_turn(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with rig.serving(CommandedEngine(KeyError("a bug"), sampled())):
        failed, whole = sorted(await rig.answers(turn(QUESTION), turn(QUESTION)), key=lambda answer: answer.index)
    assert failed.refusal is not None
    assert (failed.refusal.kind, failed.refusal.reason) == ("failed", "KeyError; the generator's log says where")
    assert whole.turn is not None
    assert "a bug" in caplog.text


async def test_a_turn_waits_while_decoding_is_paused(rig: Rig) -> None:
    engine = CommandedEngine(sampled())
    rig.gate.opened.clear()
    with rig.serving(engine):
        asking = asyncio.create_task(rig.turn(turn(QUESTION)), name="ask")
        await until(lambda: rig.format.threads)
        done, _ = await asyncio.wait({asking}, timeout=0.2)
        assert not done
        assert not engine.asked
        rig.gate.opened.set()
        assert (await asking).finish_reason == "stop"


@pytest.mark.parametrize("aborted", [[], ["run-1-r1"]], ids=["at the gate", "in an engine that stands still"])
async def test_a_turn_may_be_asked_for_elsewhere_once_there_have_been_no_weights_for_long(
    aborted: list[str], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_sampler, "WITHOUT_WEIGHTS_S", 0.05)
    monkeypatch.setattr(turn_sampler, "_LOOK_EVERY_S", 0.01)
    engine = CommandedEngine(None)
    if not aborted:
        rig.gate.opened.clear()
    with rig.serving(engine):
        asking = asyncio.create_task(rig.refused(turn(QUESTION)), name="ask")
        await until(lambda: engine.asked if aborted else rig.format.threads)
        rig.gate.held_version = NO_WEIGHTS
        kind, reason = await asyncio.wait_for(asking, 120)
    assert kind == "unavailable"
    assert "no weights" in reason
    assert engine.aborted == aborted


async def test_a_client_that_hangs_up_aborts_its_turns(rig: Rig) -> None:
    engine = CommandedEngine(None, None)
    with rig.serving(engine):
        async with RawClient(rig, turn(QUESTION, n=2), turn(QUESTION, request_id="r2")).asking():
            await until(lambda: len(engine.asked) == 2)
        await until(lambda: sorted(engine.aborted) == ["run-1-r1", "run-1-r2"])


async def test_the_end_of_the_run_ends_its_turns(rig: Rig) -> None:
    engine = CommandedEngine(None)
    with rig.serving(engine):
        asking = asyncio.create_task(rig.answers(turn(QUESTION, n=2)), name="ask")
        await until(lambda: engine.asked)
    answers = await asyncio.wait_for(asking, 120)
    for answer in answers:
        assert answer.refusal is not None
        assert answer.refusal.kind == "unavailable"
        assert "run run-1 ended on this replica" in answer.refusal.reason
    assert len(answers) == 2
    assert engine.aborted == ["run-1-r1"]


async def test_a_conversation_that_takes_long_to_render_does_not_hold_up_the_event_loop(rig: Rig) -> None:
    rig.format.may_render.clear()
    with rig.serving(CommandedEngine(sampled())):
        asking = asyncio.create_task(rig.turn(turn(QUESTION)), name="ask")
        await until(lambda: rig.format.threads)
        assert (await rig.ask(turn(QUESTION, run_id="run-2"))).status_code == 409
        rig.format.may_render.set()
        await asking
    assert all(name.startswith("turns") for name in rig.format.threads)


async def test_a_simulated_replica_answers_turns_too(rig: Rig) -> None:
    facts = ModelFacts(100, None, 64)
    settings = SimulationSettings(speed_up=1000.0, completion_tokens=5.0, completion_tokens_sigma=0.0)
    engine = SimulatedEngine(settings, facts, index=0, max_model_len=64)
    engine.take_on(LineageVersion(2, 7))
    sampler = TurnSampler(
        engine,
        run_id="run-1",
        config=CONFIG,
        gate=rig.gate,
        required_version=lambda: rig.state.required_version,
        chat_format=SimulatedChatFormat(facts),
        metrics=rig.metrics,
    )
    with rig.desk.serving(sampler):
        first = await rig.turn(turn(QUESTION))
        recorded = first.appended_ids + first.token_ids
        second = await rig.turn(turn(QUESTION, first.message, QUESTION, recorded_ids=recorded, num_recorded_messages=2))
    # A token for four characters of [{"role":"user","content":"1+1?"}].
    assert len(unpack_ids(first.appended_ids)) == len(unpack_ids(second.appended_ids)) == 9
    assert [len(unpack_ids(turn.token_ids)) for turn in (first, second)] == [5, 5]
    assert second.version_spans == (VersionSpan(7, 0, 5, incarnation=2),)
    assert first.message == {"role": "assistant", "content": "simulated token simu"}
    engine.close()
