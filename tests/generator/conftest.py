"""A real vLLM engine on CPU, one for all tests of this folder, and a model small enough for it.

Nothing here imports torch or vLLM before they are used: `make check` runs the unit tests of this folder without them.
"""

import os
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from services.generator.engine.engine import Engine, import_vllm, start_engine
from services.generator.engine.engine_spec import EngineSpec
from services.generator.engine.vllm_environment import set_environment
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from tests.conftest import RedisServer

MAX_MODEL_LEN = 128


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model with random weights."""
    from tests.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def variables_of_vllm() -> Generator[None]:
    """Set the variables that vLLM reads, and restore them: other tests of this process are to compile, for example."""
    with patch.dict(os.environ):
        set_environment(os.environ, is_cpu=True, log_level="WARNING")
        os.environ["HF_HUB_OFFLINE"] = "1"
        yield


@pytest.fixture(scope="module")
def vllm_environment() -> Iterator[None]:
    """Set the variables that vLLM reads, for the tests of one module."""
    with variables_of_vllm():
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_engine(tiny_model: Path) -> AsyncIterator[Engine]:
    """Return a running engine whose weights are labelled policy version 0."""
    with variables_of_vllm():
        assert not await import_vllm({})
        spec = EngineSpec(str(tiny_model), None, "float32", MAX_MODEL_LEN)
        engine = await start_engine(spec, extra_args={}, has_cuda=False, timeout_s=300)
    await engine.client.update_weight_version("0")
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def engine(session_engine: Engine, vllm_environment: None) -> Engine:
    """Return the engine of all tests, with the variables that it was started with."""
    return session_engine


@pytest_asyncio.fixture(loop_scope="session")
async def session_redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """Return a client of an empty server, on the event loop of the engine."""
    client = connect(redis_server.url)
    await client.flushall()
    await wait_until_ready(client, timeout_s=120)
    yield client
    await client.aclose()
