"""Generators with scripted turns behind real HTTP and the internal key, registered in a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response

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
from shared.turns import TURN_PATH, SampledTurn, TurnRequest, decode_turn_request, encode_turn
from tests.eventually import eventually
from tests.http.service_process import INTERNAL_KEY

Reply = SampledTurn | tuple[int, str | None]
"""A turn, or a problem: its status and its kind, if it has one."""
Script = Callable[[TurnRequest], Reply | Awaitable[Reply]]


class FakeGenerator:
    """One generator. ``requests`` are those that it was asked."""

    def __init__(self, name: str, url: str, script: Script) -> None:
        self.name = name
        self.url = url
        self.script = script
        self.requests: list[TurnRequest] = []

    async def answer(self, request: Request) -> Response:
        turn = decode_turn_request(await request.body())
        self.requests.append(turn)
        reply = self.script(turn)
        if isinstance(reply, Awaitable):
            reply = await reply
        if isinstance(reply, SampledTurn):
            return Response(encode_turn(reply))
        status, kind = reply
        more = {} if kind is None else {"kind": kind}
        return Response(msgspec.json.encode(problem(status, "No", f"it is {kind}.", **more)), status)


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
