"""One generator of each kind for all tests in this folder, and runs for it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from tests.conftest import RedisServer
from tests.generator_contract.implementations import GeneratorProcess, Implementation, parameters
from tests.generator_contract.played_trainer import PlayedTrainer, a_run
from tests.shared_process import SharedProcess
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session", params=parameters())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    found: Implementation = request.param
    return found


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="session")
def contract_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a server that lives as long as the generators. Every test has its own run on it."""
    server = RedisServer(tmp_path_factory.mktemp("contract-redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_generator(
    implementation: Implementation, contract_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedProcess[GeneratorProcess]]:
    """Return a function that starts the generator which most tests share."""

    def start() -> GeneratorProcess:
        log = tmp_path_factory.mktemp("generator") / "log"
        process = GeneratorProcess(implementation, contract_redis.url, "shared-generator", log)
        try:
            process.wait_until_alive()
        except BaseException:
            process.kill()
            raise
        return process

    shared = SharedProcess(start)
    yield shared
    shared.end()


@pytest.fixture
def generator(shared_generator: SharedProcess[GeneratorProcess]) -> GeneratorProcess:
    """Return the generator that most tests share."""
    return shared_generator.get()


@pytest.fixture
async def redis(contract_redis: RedisServer) -> AsyncIterator[Redis]:
    client = connect(contract_redis.url)
    await wait_until_ready(client, timeout_s=120)
    yield client
    await client.aclose()


@pytest.fixture
async def lonely(tmp_path: Path) -> AsyncIterator[tuple[RedisServer, Redis]]:
    """Return a server, and a client of it, that the shared generator does not use."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    client = connect(server.url)
    await wait_until_ready(client, timeout_s=120)
    yield server, client
    await client.aclose()
    server.kill()


@pytest.fixture
def run_options() -> dict[str, object]:
    """Return additional options of the runs of a file."""
    return {}


@pytest.fixture
async def trainer(
    redis: Redis,
    model_dir: Path,
    implementation: Implementation,
    generator: GeneratorProcess,
    run_options: dict[str, object],
) -> AsyncIterator[PlayedTrainer]:
    """Return the trainer of a new run. The shared generator has loaded its model, but has no weights yet."""
    async with a_run(redis, model_dir, implementation, **run_options) as trainer:
        await trainer.until_served_by(generator)
        yield trainer
