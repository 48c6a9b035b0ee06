"""A fleet of more than a hundred replicas, which answer only once all of them were asked, as at a rendezvous."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from services.trainer.push.membership import Abilities
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.replicas import RunReplicas
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from tests.trainer.push.test_membership import info

pytestmark = pytest.mark.unit

NUM_REPLICAS = 120


@contextlib.asynccontextmanager
async def waiting_for_each_other(run_id: str) -> AsyncGenerator[str]:
    """Serve the replicas; yields the URL below which each has its own path."""
    num_asked = 0
    all_asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        request = await reader.readuntil(b"\r\n\r\n")
        num_asked += 1
        if num_asked == NUM_REPLICAS:
            all_asked.set()
        await all_asked.wait()
        name = request.split(b"/")[1].decode()
        body = info(replica_id=name, run_id=run_id).model_dump_json().encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=NUM_REPLICAS)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        all_asked.set()
        server.close()


async def test_all_replicas_of_a_large_fleet_are_asked_at_the_same_time(redis: Redis, run_keys: RunKeys) -> None:
    async with waiting_for_each_other(run_keys.run_id) as url:
        names = [f"generator-{number}" for number in range(NUM_REPLICAS)]
        for name in names:
            await redis.hset(run_keys.generators, name, f'{{"url": "{url}/{name}"}}')
            await lease.renew(redis, leases=run_keys.leases(GENERATORS), consumer=name, lease_s=600)
        settings = PushSettings(
            run_id=run_keys.run_id, incarnation=1, internal_key="", transport="gloo", push_timeout_s=60.0,
            info_timeout_s=20.0,
        )  # fmt: skip
        replicas = RunReplicas(redis, settings, Abilities(torch_version="2.13.0+cpu", nccl_version=None))
        try:
            fleet = await replicas.reconcile()
        finally:
            await replicas.close()
    assert not fleet.refused
    assert set(fleet.ready) == set(names)
