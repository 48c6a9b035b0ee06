"""The trainer's description of itself, and who may read it."""

import asyncio
import tomllib
from pathlib import Path

import httpx
import pytest

from services.trainer.run_api.trainer_api import TrainerApi
from shared.messages import SCHEMA_VERSION
from shared.run_options.run_config import RunConfig
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About
from shared.version import VERSION
from tests.conftest import RedisServer
from tests.trainer.api_rig import INTERNAL_KEY, KEY


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_release_in_the_code_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


@pytest.mark.parametrize(("path", "right", "wrong"), [
    (ABOUT_PATH, KEY, INTERNAL_KEY), (INTERNAL_ABOUT_PATH, INTERNAL_KEY, KEY),
])  # fmt: skip
async def test_each_key_opens_the_route_that_it_is_for_and_no_other(
    client: httpx.AsyncClient, path: str, right: str, wrong: str
) -> None:
    assert (await client.get(path, headers=with_key(wrong))).status_code == 401
    told = About.model_validate((await client.get(path, headers=with_key(right))).json())
    assert (told.service, told.headrace, told.wire) == ("trainer", VERSION, SCHEMA_VERSION)


async def test_the_internal_key_opens_nothing_else(client: httpx.AsyncClient) -> None:
    for path in ("/v1/runs", "/openapi.json", "/internal/v1/weights"):
        expected = 404 if path.startswith("/internal") else 401
        assert (await client.get(path, headers=with_key(INTERNAL_KEY))).status_code == expected


async def test_the_trainer_says_what_it_is_while_redis_is_away(
    client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    redis_server.kill()
    try:
        async with asyncio.timeout(120):
            answer = await client.get(ABOUT_PATH)
    finally:
        redis_server.start()
    told = About.model_validate(answer.json())
    assert told.headrace == VERSION
    assert told.runs_disk is not None
    assert told.runs_disk.checkpoint_bytes is None


async def test_the_trainer_says_how_much_room_the_next_checkpoint_has(
    client: httpx.AsyncClient, api: TrainerApi, run_config: RunConfig
) -> None:
    before = About.model_validate((await client.get(ABOUT_PATH)).json())
    run_dir = api.settings.runs_dir / "run-a"
    for name, size in (("step_00000001", 70), ("step_00000002", 900)):
        (run_dir / "checkpoints" / name / "model").mkdir(parents=True)
        (run_dir / "checkpoints" / name / "manifest.json").write_bytes(b"x" * 10)
        (run_dir / "checkpoints" / name / "model" / "shard").write_bytes(b"x" * size)
    await api.store.create("run-a", run_config, run_dir=str(run_dir))
    await api.store.set_status("run-a", "running")
    after = About.model_validate((await client.get(ABOUT_PATH)).json())
    assert before.runs_disk is not None
    assert after.runs_disk is not None
    assert before.runs_disk.checkpoint_bytes is None
    assert after.runs_disk.checkpoint_bytes == 910
    assert after.runs_disk.is_writable
    assert 0 < after.runs_disk.free_bytes < after.runs_disk.total_bytes
