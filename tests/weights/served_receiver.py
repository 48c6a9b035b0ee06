"""A WeightReceiver with a fake engine behind real HTTP, in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Literal

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

from services.generator.engine.adapter import AdapterSpec
from services.generator.policy_api.generate_route import refuse_body
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from shared.access.door import Door
from shared.access.keyring import Keyring
from shared.access.route_table import GENERATOR
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.serving.http_guard import HttpGuard
from shared.serving.http_limits import KEEP_ALIVE_S
from tests.weights.fake_engine import FakeEngine
from tests.weights.replica import KEY, RUN_ID


class ServedReceiver:
    """One replica. ``url`` is its address."""

    def __init__(
        self,
        replica_id: str,
        url: str,
        *,
        adapter: AdapterSpec | None,
        push_staging: Literal["memory", "none"],
        kv_after_push: Literal["recompute", "keep"],
        engine: FakeEngine | None,
        grace_s: float,
    ) -> None:
        self.replica_id = replica_id
        self.url = url
        self.engine = FakeEngine(adapter) if engine is None else engine
        self.receiver = WeightReceiver(replica_id=replica_id, grace_s=grace_s)
        self.receiver.attach(
            self.engine,
            run_id=RUN_ID,
            model="tiny",
            dtype="float32",
            push_staging=push_staging,
            kv_after_push=kv_after_push,
        )

    async def register(self, redis: Redis, keys: RunKeys) -> None:
        """Register it as a generator does."""
        await redis.hset(keys.generators, self.replica_id, f'{{"url": "{self.url}"}}')
        await lease.renew(redis, leases=keys.leases(GENERATORS), consumer=self.replica_id, lease_s=600)


@contextlib.asynccontextmanager
async def serve(
    replica_id: str,
    *,
    adapter: AdapterSpec | None = None,
    push_staging: Literal["memory", "none"] = "memory",
    kv_after_push: Literal["recompute", "keep"] = "recompute",
    engine: FakeEngine | None = None,
    grace_s: float = 3.0,
) -> AsyncGenerator[ServedReceiver]:
    """Serve a receiver on a free port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    served = ServedReceiver(
        replica_id,
        url,
        adapter=adapter,
        push_staging=push_staging,
        kv_after_push=kv_after_push,
        engine=engine,
        grace_s=grace_s,
    )
    app = FastAPI()
    app.include_router(make_router(served.receiver))
    app.add_exception_handler(RequestValidationError, refuse_body)
    guarded = Door(HttpGuard(app), routes=GENERATOR, keyring=Keyring(internal=KEY))
    server = uvicorn.Server(
        uvicorn.Config(guarded, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name=f"serve {replica_id}")
    try:
        async with asyncio.timeout(120):
            while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield served
    finally:
        server.should_exit = True
        await task
        served.engine.close()
        listener.close()
