"""Generators with scripted turns behind real HTTP and the internal key, registered in a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from shared.access.door import Door
from shared.access.keyring import Keyring
from shared.access.route_table import GENERATOR
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.registration import Registration
from shared.service.tls import ServerCertificate
from shared.serving.http_guard import HttpGuard, problem
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.turns import (
    TURN_PATH,
    SampledTurn,
    TurnAnswer,
    TurnRefusal,
    TurnRequest,
    decode_turn_requests,
    encode_turn_answers,
)
from tests.eventually import eventually
from tests.http.service_process import INTERNAL_KEY

Reply = SampledTurn | TurnRefusal | bytes | tuple[int, str | None] | None
"""A turn or its refusal, bytes in place of its line, or a problem for the whole request: its status and its kind, if it
has one. None ends the answer."""
Script = Callable[[TurnRequest], Reply | Awaitable[Reply]]
"""Called for each turn. Only replies that are not awaited can be a problem."""


class HangsOnce:
    """A script in which the second turn of the group's second rollout hangs the first time that it is asked for.

    Equal turns of both rollouts may come as one request, which has the first one's name.

    Args:
        reply: Returns the reply to a request, and to the number of turns before it.
    """

    def __init__(self, reply: Callable[[TurnRequest, int], Reply]) -> None:
        self.hangs = asyncio.Event()
        self._reply = reply

    async def __call__(self, request: TurnRequest) -> Reply:
        num_before = [message["role"] for message in request.messages].count("assistant")
        is_the_second = request.n == 2 or request.request_id.startswith("00000000-1-")
        if num_before == 1 and is_the_second and not self.hangs.is_set():
            self.hangs.set()
            await asyncio.sleep(600)
        return self._reply(request, num_before)


class FakeGenerator:
    """One generator.

    Attributes:
        bodies: The lists of requests that it was asked.
        may_begin: It answers nothing while this is not set; it is at first.
        num_closed: Number of requests whose client has gone before the end of the answer.
        ports: The ports of its clients, one for each connection.
    """

    def __init__(self, name: str, url: str, script: Script) -> None:
        self.name = name
        self.url = url
        self.script = script
        self.bodies: list[list[TurnRequest]] = []
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.num_closed = 0
        self.ports = set[int]()

    @property
    def requests(self) -> list[TurnRequest]:
        """All requests."""
        return [request for body in self.bodies for request in body]

    async def answer(self, request: Request) -> Response:
        turns = decode_turn_requests(await request.body())
        self.bodies.append(turns)
        assert request.client is not None
        self.ports.add(request.client.port)
        await self.may_begin.wait()
        replies = [(index, self.script(turn)) for index, turn in enumerate(turns) for _ in range(turn.n)]
        for _, reply in replies:
            if isinstance(reply, tuple):
                status, kind = reply
                more = {} if kind is None else {"kind": kind}
                return Response(msgspec.json.encode(problem(status, "No", f"it is {kind}.", **more)), status)
        return StreamingResponse(self._lines([_line(index, reply) for index, reply in replies]))

    async def _lines(self, replies: Sequence[Coroutine[Any, Any, bytes | None]]) -> AsyncGenerator[bytes]:
        lines = [asyncio.create_task(reply, name="a turn") for reply in replies]
        try:
            for ready in asyncio.as_completed(lines):
                if (line := await ready) is None:
                    return
                yield line
        except (asyncio.CancelledError, GeneratorExit):
            self.num_closed += 1
            raise
        finally:
            for task in lines:
                task.cancel()


async def _line(index: int, reply: Any) -> bytes | None:
    if isinstance(reply, Awaitable):
        return await _line(index, await cast("Any", reply))
    if reply is None or isinstance(reply, bytes):
        return reply
    named: dict[str, Any] = {"refusal": reply} if isinstance(reply, TurnRefusal) else {"turn": reply}
    return encode_turn_answers([TurnAnswer(index, **named)])


@contextlib.asynccontextmanager
async def generator(
    redis: Redis,
    keys: RunKeys,
    script: Script,
    *,
    name: str = "generator-0",
    doing: str = "",
    lease_s: float = 600.0,
    certificate: ServerCertificate | None = None,
) -> AsyncGenerator[FakeGenerator]:
    """Serve a generator on a free port, registered as a generator of the run."""
    scheme = "http" if certificate is None else "https"
    with listening_socket("127.0.0.1", 0) as listener:
        fake = FakeGenerator(name, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", script)
        app = FastAPI()
        app.add_api_route(TURN_PATH, fake.answer, methods=["POST"], response_model=None)
        guarded = Door(HttpGuard(app), routes=GENERATOR, keyring=Keyring(internal=INTERNAL_KEY))
        server = HttpServer(guarded, HttpLimits(), certificate=certificate, drain_s=1)
        serving = asyncio.create_task(server.serve(sockets=[listener]), name=f"serve {name}")
        await eventually(lambda: server.started)
        await redis.hset(keys.generators, name, msgspec.json.encode(Registration(fake.url, doing)))
        await lease.renew(redis, leases=keys.leases(GENERATORS), consumer=name, lease_s=lease_s)
        try:
            yield fake
        finally:
            server.should_exit = True
            async with asyncio.timeout(120):
                await serving
