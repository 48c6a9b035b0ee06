"""``POST /internal/v1/turns``: what the engine is given, what is refused and how, and when a turn ends early."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.generator.engine.engine import EngineDiedError
from services.generator.engine.output_gate import UnverifiedError
from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts import SampledCompletion
from services.generator.service_state import ServiceState
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulated_chat_format import SimulatedChatFormat
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk, TurnSampler
from shared.arrays import unpack_ids, unpack_logprobs
from shared.errors import MessageError, UnavailableError
from shared.lineage import LineageVersion
from shared.messages import VersionSpan
from shared.run_options.run_config import RunConfig
from shared.turns import (
    TURN_PATH,
    ChatMessage,
    SampledTurn,
    TurnRefusedError,
    TurnRequest,
    decode_sampled_turn,
    encode_turn,
)

pytestmark = pytest.mark.unit

QUESTION: ChatMessage = {"role": "user", "content": "1+1?"}
CONFIG = RunConfig(
    model="/nowhere", dataset_name="/nowhere.jsonl", reward_funcs=["accuracy_reward"], max_completion_length=20
)


class Gate:
    """A weight gate, and the weights as the state sees them."""

    is_asleep = False

    def __init__(self) -> None:
        self.held_version = LineageVersion(2, 7)
        self.opened = asyncio.Event()
        self.opened.set()

    async def wait_open(self, required: LineageVersion) -> None:
        while not self.held_version.satisfies(required):
            self.opened.clear()
            await self.opened.wait()
        await self.opened.wait()


class CommandedEngine:
    """Answers each request with the next entry of ``answers``; None never ends."""

    def __init__(self, *answers: SampledCompletion | Exception | None) -> None:
        self.max_model_len: int | None = 100
        self.answers = list(answers)
        self.asked: list[tuple[str, list[int], int | None]] = []
        self.aborted: list[str] = []

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        config: RunConfig,
        request_id: str,
        max_tokens: int | None = None,
    ) -> list[SampledCompletion]:
        assert num_completions == 1
        self.asked.append((request_id, list(prompt_ids), max_tokens))
        answer = self.answers.pop(0)
        if answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(request_id)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return [answer]


class TinyFormat:
    """Renders a message as one token, its number of characters."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.may_render = threading.Event()
        self.may_render.set()

    def appended_ids(self, request: TurnRequest) -> list[int]:
        self.threads.add(threading.current_thread().name)
        assert self.may_render.wait(120)
        follow = request.messages[request.num_recorded_messages :]
        if any(message["role"] == "system" for message in follow):
            raise TurnRefusedError("the template takes no system message", kind="chat_template")
        return [len(message["content"]) for message in follow]

    def message(self, request: TurnRequest, completion: SampledCompletion) -> ChatMessage:
        self.threads.add(threading.current_thread().name)
        return {"role": "assistant", "content": f"{len(completion.token_ids)} tokens"}


class Rig:
    """A replica with only this route."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.state = ServiceState(self.gate)
        self.state.serve()
        self.format = TinyFormat()
        self.metrics = GeneratorMetrics()
        self.desk = TurnDesk(self.state)
        self.app = FastAPI()
        self.app.include_router(make_turn_router(self.desk))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://generator")

    def serving(self, engine: Any, config: RunConfig = CONFIG) -> contextlib.AbstractContextManager[None]:
        return self.desk.serving(
            TurnSampler(
                engine,
                run_id="run-1",
                config=config,
                gate=self.gate,
                required_version=lambda: self.state.required_version,
                chat_format=self.format,
                metrics=self.metrics,
            )
        )

    async def ask(self, *messages: ChatMessage, **fields: Any) -> httpx.Response:
        named: dict[str, Any] = {"run_id": "run-1", "request_id": "r1"} | fields
        request = TurnRequest(messages=[*messages], **named)
        return await self.client.post(TURN_PATH, content=encode_turn(request))

    async def turn(self, *messages: ChatMessage, **fields: Any) -> SampledTurn:
        answer = await self.ask(*messages, **fields)
        assert answer.status_code == 200, answer.text
        return decode_sampled_turn(answer.content)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with rig.client:
        yield rig


def sampled(num_tokens: int = 3, finish_reason: str = "stop") -> SampledCompletion:
    return SampledCompletion(
        "", [*range(40, 40 + num_tokens)], [-0.5] * num_tokens, [("2:7", 0, num_tokens)], finish_reason
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.01)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    return body["status"], body["kind"], body["detail"]


async def test_the_engine_continues_exactly_what_was_recorded(rig: Rig) -> None:
    engine = CommandedEngine(sampled(3), sampled(2, "length"))
    with rig.serving(engine):
        first = await rig.turn(QUESTION)
        assert unpack_ids(first.appended_ids).tolist() == [4]
        assert unpack_ids(first.token_ids).tolist() == [40, 41, 42]
        assert unpack_logprobs(first.logprobs).tolist() == [-0.5] * 3
        assert first.version_spans == (VersionSpan(7, 0, 3, incarnation=2),)
        assert (first.finish_reason, first.message) == ("stop", {"role": "assistant", "content": "3 tokens"})
        assert 0 < first.started_at_s <= first.ended_at_s

        recorded = first.appended_ids + first.token_ids
        rewritten = {"role": "assistant", "content": "other text"}
        second = await rig.turn(
            QUESTION, rewritten, {"role": "tool", "content": "2"}, recorded_ids=recorded, num_recorded_messages=2,
            request_id="r2",
        )  # fmt: skip
    assert unpack_ids(second.appended_ids).tolist() == [1]
    assert second.finish_reason == "length"
    assert engine.asked == [("run-1-r1", [4], 20), ("run-1-r2", [4, 40, 41, 42, 1], 20)]
    assert rig.metrics.registry.get_sample_value("headrace_generated_tokens_total") == 5


async def test_a_turn_has_as_many_tokens_as_the_request_the_run_and_the_context_allow(rig: Rig) -> None:
    engine = CommandedEngine(*[sampled()] * 6)
    with rig.serving(engine):
        for max_tokens, longest, row in ((0, 100, 0), (7, 100, 0), (30, 100, 0), (7, 6, 0), (7, 6, 5), (0, None, 9)):
            engine.max_model_len = longest
            await rig.turn(QUESTION, QUESTION, max_tokens=max_tokens, max_row_tokens=row)
    assert [most for _, _, most in engine.asked] == [20, 7, 20, 4, 3, 7]


async def test_a_conversation_that_fills_the_context_is_refused_and_nothing_is_sampled(rig: Rig) -> None:
    engine = CommandedEngine()
    engine.max_model_len = 2
    with rig.serving(engine):
        status, kind, detail = refusal(await rig.ask(QUESTION, QUESTION))
    assert (status, kind) == (422, "context_length")
    assert "has 2 tokens, and the context of the model 2" in detail
    assert not engine.asked


async def test_a_conversation_that_fills_its_row_is_refused_too(rig: Rig) -> None:
    with rig.serving(CommandedEngine()):
        status, kind, detail = refusal(await rig.ask(QUESTION, QUESTION, max_row_tokens=2))
    assert (status, kind) == (422, "context_length")
    assert "has 2 tokens, and the rollout 2" in detail


async def test_what_the_template_or_the_engine_refuses_is_no_error_of_the_service(rig: Rig) -> None:
    infinite = SampledCompletion("", [40], [float("-inf")], [("2:7", 0, 1)], "stop")
    engine = CommandedEngine(MessageError("token id 9999 is out of vocabulary"), infinite)
    with rig.serving(engine):
        assert refusal(await rig.ask({"role": "system", "content": "x"})) == (
            422, "chat_template", "the template takes no system message.",
        )  # fmt: skip
        assert refusal(await rig.ask(QUESTION)) == (422, "sampling", "token id 9999 is out of vocabulary.")
        status, kind, detail = refusal(await rig.ask(QUESTION))
    assert (status, kind) == (422, "sampling")
    assert "turn r1 has an infinite logprob" in detail


async def test_a_replica_that_does_not_serve_the_run_says_so(rig: Rig) -> None:
    idle = await rig.ask(QUESTION)
    assert (idle.status_code, idle.headers["retry-after"]) == (503, "1")
    with rig.serving(CommandedEngine()):
        status, kind, detail = refusal(await rig.ask(QUESTION, run_id="run-2"))
        assert (status, kind) == (409, "another_run")
        assert "serves run run-1, not run-2" in detail
        rig.state.required_version = LineageVersion(2, 8)
        stale = await rig.ask(QUESTION)
        assert (stale.status_code, stale.headers["retry-after"]) == (503, "1")
        assert "waiting for weights" in stale.json()["detail"]


HEAD = b'{"run_id": "r", "request_id": "r", "messages": '


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(b"{\xff", "malformed", id="not JSON"),
        pytest.param(HEAD + b'[{"x": ' + b"[" * 100_000, "recursion", id="nested too deeply"),
        pytest.param(b'{"run_id": "r"}', "request_id", id="a field is missing"),
        pytest.param(HEAD + b"[]}", "0 messages", id="no message"),
        pytest.param(HEAD + b'["x"]}', "messages", id="a message that is text"),
        pytest.param(HEAD + b'[{}], "num_recorded_messages": 1}', "0 bytes", id="no recorded ids"),
        pytest.param(HEAD + b'[{}], "recorded_ids": "AAAA"}', "3 bytes", id="a part of an id"),
        pytest.param(
            HEAD + b'[{}], "recorded_ids": "AAAAAA==", "num_recorded_messages": 1}',
            "is not an assistant's",
            id="a recorded message that was not sampled",
        ),
        pytest.param(
            HEAD + b'[{"role": "assistant"}], "recorded_ids": "/////w==", "num_recorded_messages": 1}',
            "negative",
            id="a negative id",
        ),
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
        assert unpack_ids((await rig.turn(QUESTION)).token_ids).tolist() == [40, 41, 42]
    assert [request_id for request_id, _, _ in engine.asked] == ["run-1-r1", "run-1-r1-again-1"]


async def test_an_engine_that_fails_is_a_503(rig: Rig) -> None:
    with rig.serving(CommandedEngine(EngineDiedError("vLLM's engine failed"), UnavailableError("the run is over"))):
        for reason in ("vLLM's engine failed", "the run is over"):
            failed = await rig.ask(QUESTION)
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
            assert reason in failed.json()["detail"]


async def test_a_turn_waits_while_decoding_is_paused(rig: Rig) -> None:
    engine = CommandedEngine(sampled())
    rig.gate.opened.clear()
    with rig.serving(engine):
        asking = asyncio.create_task(rig.turn(QUESTION), name="ask")
        await until(lambda: rig.format.threads)
        done, _ = await asyncio.wait({asking}, timeout=0.2)
        assert not done
        assert not engine.asked
        rig.gate.opened.set()
        assert (await asking).finish_reason == "stop"


async def test_a_client_that_hangs_up_aborts_its_turn(rig: Rig) -> None:
    engine = CommandedEngine(None)
    body = encode_turn(TurnRequest("run-1", "r1", [QUESTION]))
    hung_up = asyncio.Event()
    pieces: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if pieces:
            return pieces.pop()
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": TURN_PATH, "raw_path": TURN_PATH.encode(),
        "query_string": b"", "headers": [], "scheme": "http", "client": ("127.0.0.1", 1), "server": ("generator", 80),
    }  # fmt: skip
    with rig.serving(engine):
        answering = asyncio.create_task(rig.app(scope, receive, send), name="answer")
        await until(lambda: engine.asked)
        hung_up.set()
        await asyncio.wait_for(answering, 120)
        assert engine.aborted == ["run-1-r1"]


async def test_the_end_of_the_run_ends_its_turns(rig: Rig) -> None:
    engine = CommandedEngine(None)
    with rig.serving(engine):
        asking = asyncio.create_task(rig.ask(QUESTION), name="ask")
        await until(lambda: engine.asked)
    ended = await asyncio.wait_for(asking, 120)
    assert ended.status_code == 503
    assert "run run-1 ended on this replica" in ended.json()["detail"]
    assert engine.aborted == ["run-1-r1"]


async def test_a_conversation_that_takes_long_to_render_does_not_hold_up_the_event_loop(rig: Rig) -> None:
    rig.format.may_render.clear()
    with rig.serving(CommandedEngine(sampled())):
        asking = asyncio.create_task(rig.turn(QUESTION), name="ask")
        await until(lambda: rig.format.threads)
        assert (await rig.ask(QUESTION, run_id="run-2")).status_code == 409
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
        first = await rig.turn(QUESTION)
        recorded = first.appended_ids + first.token_ids
        second = await rig.turn(QUESTION, first.message, QUESTION, recorded_ids=recorded, num_recorded_messages=2)
    # A token for four characters of [{"role":"user","content":"1+1?"}].
    assert len(unpack_ids(first.appended_ids)) == len(unpack_ids(second.appended_ids)) == 9
    assert [len(unpack_ids(turn.token_ids)) for turn in (first, second)] == [5, 5]
    assert second.version_spans == (VersionSpan(7, 0, 5, incarnation=2),)
    assert first.message == {"role": "assistant", "content": "simulated token simu"}
    engine.close()
