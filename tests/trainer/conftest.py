"""A run API on a real port, with a real Redis and a tiny rewarder behind it; and a tiny model on disk.

Nothing here imports torch before it is used, because `make check` runs the unit tests of this folder without it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import Redis
from tests.kept_ports import kept_port
from tests.trainer.api_rig import INTERNAL_KEY, KEY, DatasetFile, FakeRewarder, FakeSessions, serving
from tests.trainer.beginning.made_checkpoints import write_tensors
from tests.trainer.rank_rig import COMMAND, RankPlan
from tests.trainer.service_rig import Service, Start, wait_until


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model. Do not change it."""
    from tests.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def rewarder() -> Iterator[FakeRewarder]:
    """Return a rewarder on a real port."""
    fake = FakeRewarder()
    yield fake
    fake.close()


@pytest.fixture
def sessions() -> Iterator[FakeSessions]:
    """Return a sessions service on a real port."""
    fake = FakeSessions()
    yield fake
    fake.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return a directory that looks like a transformers model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    (directory / "tokenizer_config.json").write_text("{}")
    write_tensors(directory / "model.safetensors", ["w"])
    return directory


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetFile:
    """Return a file with ten usable rows."""
    return DatasetFile(tmp_path / "train.jsonl")


@pytest.fixture
def run(model_dir: Path, dataset: DatasetFile) -> dict[str, Any]:
    """Return the body of a valid run."""
    return {
        "model": str(model_dir),
        "dataset_name": str(dataset.path),
        "reward_funcs": ["accuracy_reward"],
        "num_generations": 4,
        "groups_per_step": 2,
        "max_steps": 4,
        "max_completion_length": 16,
        "save_steps": 2,
    }


@pytest.fixture
def settings(redis_url: str, rewarder: FakeRewarder, sessions: FakeSessions, tmp_path: Path) -> TrainerSettings:
    """Return settings with short waits."""
    return TrainerSettings(
        redis_url=SecretStr(redis_url),
        api_key=SecretStr(KEY),
        internal_key=SecretStr(INTERNAL_KEY),
        rewarder_url=rewarder.url,
        sessions_url=sessions.url,
        runs_dir=tmp_path / "runs",
        supervise_every_s=0.05,
        first_backoff_s=0.01,
        last_backoff_s=0.05,
        rank_stop_grace_s=2.0,
        rank_exit_grace_s=0.5,
        heartbeat_s=0.1,
        reward_check_timeout_s=60.0,
        tool_check_timeout_s=60.0,
    )


@pytest.fixture
async def api(settings: TrainerSettings, redis: Redis) -> TrainerApi:
    """Return the wired-up API. No supervisor runs, so runs stay queued."""
    return make_api(settings, redis, stopping=asyncio.Event())


@pytest.fixture
async def client(api: TrainerApi) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client with the key of a served API."""
    async with serving(api) as found:
        yield found


@pytest.fixture
def plan(tmp_path: Path) -> RankPlan:
    """Return the plan of what the ranks will do."""
    return RankPlan(tmp_path)


@pytest.fixture
def environment(settings: TrainerSettings, plan: RankPlan) -> dict[str, str]:
    """Return the environment of a service whose rank works until it is asked to stop."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return own | {
        "HEADRACE_REDIS_URL": settings.redis_url.get_secret_value(),
        "HEADRACE_PORT": str(kept_port()),
        "HEADRACE_API_KEY": KEY,
        "HEADRACE_RUNS_DIR": str(settings.runs_dir),
        "HEADRACE_REWARDER_URL": settings.rewarder_url,
        "HEADRACE_SESSIONS_URL": settings.sessions_url,
        "HEADRACE_RANK_COMMAND": "[" + ", ".join(f'"{word}"' for word in COMMAND) + "]",
        "HEADRACE_SUPERVISE_EVERY_S": "0.05",
        "HEADRACE_RANK_STOP_GRACE_S": "1",
        "FAKE_RANK_DIR": str(plan.directory),
        "FAKE_RANK_PLAN": "work finish",
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Generator[Start]:
    """Return a function that starts a service and waits until it is ready."""
    started: list[Service] = []

    def start_service(**more: str) -> Service:
        service = Service(environment | more, tmp_path / "service.log")
        started.append(service)
        wait_until(service.is_ready)
        return service

    yield start_service
    for service in started:
        service.close()
