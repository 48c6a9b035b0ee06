"""Replicas with a real vLLM, replicas with a fake engine, and senders for both."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from services.generator.engine.adapter import AdapterSpec
from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.shared_process import SharedProcess
from tests.weights.known_weights import LORA_ALPHA, LORA_RANK, make_model_dir
from tests.weights.replica import ReplicaProcess
from tests.weights.senders import make_quick_sender, make_sender
from tests.weights.served_receiver import ServedReceiver, serve

_INCARNATIONS = itertools.count(1, step=10_000)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("tied"), tied=True)


StartReplica = Callable[..., SharedProcess[ReplicaProcess]]


@pytest.fixture(scope="session")
def shared_replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartReplica]:
    """Return a function that returns the shared replica with a given name."""
    known: dict[str, SharedProcess[ReplicaProcess]] = {}

    def shared(replica_id: str, model_dir: Path, more: dict[str, str] | None = None) -> SharedProcess[ReplicaProcess]:
        def start() -> ReplicaProcess:
            process = ReplicaProcess(replica_id, model_dir, tmp_path_factory.mktemp(replica_id) / "log", more=more)
            try:
                process.wait_until_up()
            except BaseException:
                process.kill()
                raise
            return process

        return known.setdefault(replica_id, SharedProcess(start))

    yield shared
    for one in known.values():
        one.end()


@pytest.fixture
def replica(shared_replicas: StartReplica, model_dir: Path) -> ReplicaProcess:
    """Return the replica that most tests share."""
    return shared_replicas("generator-1", model_dir).get()


@pytest.fixture
def tied_replica(shared_replicas: StartReplica, tied_model_dir: Path) -> ReplicaProcess:
    """Return a replica whose model has tied embeddings."""
    return shared_replicas("generator-tied", tied_model_dir).get()


@pytest.fixture
def adapter_replica(shared_replicas: StartReplica, tied_model_dir: Path) -> ReplicaProcess:
    """Return a replica that serves adapters of a model with tied embeddings."""
    more = {"--lora-rank": str(LORA_RANK), "--lora-alpha": str(LORA_ALPHA)}
    return shared_replicas("generator-lora", tied_model_dir, more).get()


@pytest.fixture
def mortal(shared_replicas: StartReplica, model_dir: Path) -> ReplicaProcess:
    """Return a second replica, which a test may kill. The next test that needs one then waits for another to start."""
    return shared_replicas("generator-2", model_dir).get()


@pytest.fixture
async def incarnation(redis: Redis, run_keys: RunKeys) -> int:
    """Return the trainer's incarnation. It is higher than in all other tests, because the replicas live longer."""
    number = next(_INCARNATIONS)
    await redis.set(run_keys.epoch, number)
    return number


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return a sender with that incarnation."""
    sender = make_sender(redis, incarnation)
    yield sender
    await sender.close()


@pytest.fixture
async def quick_sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return a sender of small chunks."""
    sender = make_quick_sender(redis, incarnation)
    yield sender
    await sender.close()


@pytest.fixture
def adapter() -> AdapterSpec | None:
    """Return what the fake engines of `one` and `two` serve: a whole model, unless a module overrides this."""
    return None


@pytest.fixture
async def one(redis: Redis, run_keys: RunKeys, adapter: AdapterSpec | None) -> AsyncIterator[ServedReceiver]:
    """Return a replica with a fake engine, registered for the run."""
    async with serve("generator-1", adapter=adapter) as served:
        await served.register(redis, run_keys)
        yield served


@pytest.fixture
async def two(redis: Redis, run_keys: RunKeys, adapter: AdapterSpec | None) -> AsyncIterator[ServedReceiver]:
    """Return another such replica."""
    async with serve("generator-2", adapter=adapter) as served:
        await served.register(redis, run_keys)
        yield served
