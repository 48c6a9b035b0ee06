"""A replica with only the route for turns, its engine and chat format made by hand, and clients of it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts import SampledCompletion
from services.generator.service_state import ServiceState
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk, TurnSampler
from shared.lineage import LineageVersion
from shared.run_options.run_config import RunConfig
from shared.turns import (
    TURN_PATH,
    ChatMessage,
    SampledTurn,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
    decode_turn_answer,
    encode_turn_requests,
)

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

    def __init__(self, *answers: SampledCompletion | Sequence[SampledCompletion] | Exception | None) -> None:
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
        completions = [answer] if isinstance(answer, SampledCompletion) else [*answer]
        assert len(completions) == num_completions
        return completions


class TinyFormat:
    """Renders a message as one token, its number of characters."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.num_rendered = 0
        self.may_render = threading.Event()
        self.may_render.set()

    def appended_ids(self, request: TurnRequest) -> list[int]:
        self.threads.add(threading.current_thread().name)
        assert self.may_render.wait(120)
        self.num_rendered += 1
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

    async def ask(self, *requests: TurnRequest) -> httpx.Response:
        return await self.client.post(TURN_PATH, content=encode_turn_requests(requests))

    async def answers(self, *requests: TurnRequest) -> list[TurnAnswer]:
        """Return the answers in the order of their lines."""
        answer = await self.ask(*requests)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonl"), answer.text
        return [decode_turn_answer(line) for line in answer.content.splitlines()]

    async def turn(self, request: TurnRequest) -> SampledTurn:
        (answer,) = await self.answers(request)
        assert answer.turn is not None, answer.refusal
        return answer.turn

    async def refused(self, request: TurnRequest) -> tuple[str, str]:
        """Return the kind of a turn's refusal, and the reason."""
        (answer,) = await self.answers(request)
        assert answer.refusal is not None
        return answer.refusal.kind, answer.refusal.reason


def turn(*messages: ChatMessage, **fields: Any) -> TurnRequest:
    named: dict[str, Any] = {"run_id": "run-1", "request_id": "r1"} | fields
    return TurnRequest(messages=[*messages], **named)


class RawClient:
    """A client that reads an answer while it is sent, and may hang up before its end."""

    def __init__(self, rig: Rig, *requests: TurnRequest) -> None:
        self.lines: list[bytes] = []
        self._app = rig.app
        self._hung_up = asyncio.Event()
        body = encode_turn_requests(requests)
        self._pieces: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        """Ask; hang up at the end of the block."""
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": TURN_PATH, "raw_path": TURN_PATH.encode(),
            "query_string": b"", "headers": [], "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("generator", 80),
        }  # fmt: skip
        answering = asyncio.create_task(self._app(scope, self._receive, self._send), name="answer")
        try:
            yield
        finally:
            self._hung_up.set()
            await asyncio.wait_for(answering, 120)

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            return self._pieces.pop()
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.lines += message.get("body", b"").splitlines()


def sampled(num_tokens: int = 3, finish_reason: str = "stop") -> SampledCompletion:
    return SampledCompletion(
        "", [*range(40, 40 + num_tokens)], [-0.5] * num_tokens, [("2:7", 0, num_tokens)], finish_reason
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.01)
