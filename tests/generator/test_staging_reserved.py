"""A generator starts its engine and allocates staging memory before it is open to a push, or says why it cannot."""

from typing import Any

import pytest
from pydantic import SecretStr

from services.generator import run_follower
from services.generator.engine.engine import EngineDiedError
from services.generator.engine.engine_spec import EngineSpec
from services.generator.settings import GeneratorSettings
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from tests.eventually import eventually
from tests.generator.test_weights_shown import PAUSED_AT_3, LoadedEngine, NoReceiving, follow, following, shown

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(redis_url: str) -> GeneratorSettings:
    return GeneratorSettings(redis_url=SecretStr(redis_url), replica_id="generator-0", poll_every_s=0.02)


def recording(calls: list[str], *, failure: str | None = None) -> type[NoReceiving]:
    """Return a receiving end that records what it is asked for, and that fails if ``failure`` is given."""

    class Recording(NoReceiving):
        async def call_workers(self, move: str) -> None:
            calls.append(move)
            if failure is not None:
                raise Exception(failure)  # noqa: TRY002  as vLLM does

        def close(self) -> None:
            calls.append("close")

    return Recording


@pytest.mark.parametrize(("options", "calls"), [({}, ["reserve"]), ({"push_staging": "none"}, [])])
async def test_memory_is_allocated_before_weights_are_received_if_the_run_stages_them(
    redis: Redis,
    run_config: Any,
    settings: GeneratorSettings,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    calls: list[str],
) -> None:
    made: list[str] = []
    store = RunStore(redis)
    await store.create("run-test", run_config.model_copy(update=options), run_dir="/nowhere")
    follower, metrics, _ = follow(redis, settings, monkeypatch)
    monkeypatch.setattr(run_follower, "VllmReceivingEngine", recording(made))
    async with following(follower.run(has_cuda=False)):
        await store.set_current_run("run-test")
        await eventually(lambda: shown(metrics.registry) == PAUSED_AT_3)
    assert made == calls


async def test_a_run_whose_staging_memory_has_no_room_is_refused_with_the_reason(
    redis: Redis,
    run_keys: RunKeys,
    settings: GeneratorSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    follower, _, _ = follow(redis, settings, monkeypatch)
    monkeypatch.setattr(run_follower, "VllmReceivingEngine", recording(made, failure="cannot allocate 131 GiB"))
    async with following(follower.run(has_cuda=False)):
        await RunStore(redis).set_current_run(run_keys.run_id)

        async def is_refused() -> bool:
            return bool(await redis.hlen(run_keys.refusals))

        await eventually(is_refused)
        (refusal,) = decode_refusals(await redis.hgetall(run_keys.refusals))
    assert "cannot allocate 131 GiB" in refusal.reason
    assert "push_staging: none" in refusal.reason
    assert made == ["reserve", "close"]


async def test_an_engine_that_does_not_start_with_the_options_of_a_run_is_started_again(
    redis: Redis, run_config: Any, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared GPU, the trainer may hold the memory at first."""
    store = RunStore(redis)
    await store.create(
        "run-test", run_config.model_copy(update={"vllm": {"gpu_memory_utilization": 0.4}}), run_dir="/nowhere"
    )
    keys = RunKeys("run-test")
    follower, metrics, _ = follow(redis, settings, monkeypatch)
    starts = 0

    async def start_late(spec: EngineSpec, **_: object) -> LoadedEngine:
        nonlocal starts
        starts += 1
        if starts <= 2:
            raise EngineDiedError("No available memory for the cache blocks")
        return LoadedEngine(spec)

    monkeypatch.setattr(run_follower, "start_engine", start_late)
    monkeypatch.setattr(run_follower, "_FIRST_PAUSE_S", 0.5)

    async def refusal() -> str:
        return "".join(one.reason for one in decode_refusals(await redis.hgetall(keys.refusals)))

    async with following(follower.run(has_cuda=False)):
        await store.set_current_run("run-test")
        for pause in ("0.5 s", "1 s"):

            async def is_refused(pause: str = pause) -> bool:
                return (await refusal()).endswith(
                    f"No available memory for the cache blocks; it is started again after {pause}"
                )

            await eventually(is_refused)
        await eventually(lambda: shown(metrics.registry) == PAUSED_AT_3)
        assert await refusal() == ""
    assert starts == 3
