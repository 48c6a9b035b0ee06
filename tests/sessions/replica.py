"""A replica of the sessions service in a process of its own, and what it has completed."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from shared.messages import CompletedGroup, decode_completed_group, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.groups import prompt_group
from tests.http.service_process import ServiceProcess
from tests.sessions.scripted import user
from tests.stream_view import entries


@contextlib.contextmanager
def service(redis_url: str, directory: Path, **settings: str) -> Generator[ServiceProcess]:
    """Run a replica with the code of a directory. It is killed at the end."""
    process = ServiceProcess(
        "sessions",
        redis_url,
        directory,
        HEADRACE_TOOL_PATH=str(directory),
        HEADRACE_NUM_TOOL_WORKERS="2",
        HEADRACE_NUM_AGENT_WORKERS="2",
        HEADRACE_POLL_EVERY_S="0.05",
        HEADRACE_IMPORT_TIMEOUT_S="240",
        **settings,
    )
    try:
        yield process
    finally:
        process.kill()


async def completed(redis: Redis, keys: RunKeys, *, process: ServiceProcess) -> CompletedGroup:
    """Wait for the run's only group."""

    async def is_there() -> bool:
        assert process.is_alive(), process.log()
        return bool(await redis.xlen(keys.completions))

    await eventually(is_there)
    ((_, fields),) = await entries(redis, keys.completions)
    return decode_completed_group(fields["payload"])


async def begin_run(
    redis: Redis,
    config: RunConfig,
    *,
    run_id: str = "run-test",
    asks: str = "2+2?",
    columns: dict[str, object] | None = None,
    **options: object,
) -> RunKeys:
    """Make a run with these options, one prompt for two rollouts, and its first weights."""
    store, keys = RunStore(redis), RunKeys(run_id)
    await store.create(run_id, config.model_copy(update=options), run_dir="unused")
    await store.set_status(run_id, "running")
    group = msgspec.structs.replace(prompt_group(num_generations=2), run_id=run_id, prompt=[user(asks)], prompt_ids=b"")
    if columns is not None:
        group = msgspec.structs.replace(group, columns=columns)
    await redis.xadd(keys.prompts, {"group_id": group.group_id, "payload": encode(group)})
    await redis.set(keys.required_version, "1:3")
    return keys


async def why_refused(redis: Redis, keys: RunKeys, *, process: ServiceProcess) -> str:
    """Wait until the service refuses the run, and return its reason."""

    async def is_refused() -> Any:
        assert process.is_alive(), process.log()
        return await redis.hgetall(keys.refusals)

    await eventually(is_refused)
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert refusal.kind == "sessions"
    return refusal.reason
