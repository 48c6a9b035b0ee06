"""Replicas with a real vLLM each, and a sender for them."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from services.trainer.push.weight_sender import WeightSender
from shared.keys import RunKeys
from shared.redis_connection import Redis
from tests.weights.known_weights import LORA_ALPHA, LORA_RANK, make_model_dir
from tests.weights.replica import KEY, RUN_ID, ReplicaProcess

PUSH_TIMEOUT_S = 20.0
_INCARNATIONS = itertools.count(1, step=10_000)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def replica(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    """Return the replica most tests share."""
    yield from _started("generator-1", model_dir, tmp_path_factory)


@pytest.fixture(scope="session")
def tied_replica(tied_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    """Return a replica whose model has tied embeddings."""
    yield from _started("generator-tied", tied_model_dir, tmp_path_factory)


@pytest.fixture(scope="session")
def adapter_replica(tied_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    """Return a replica that serves adapters of a model with tied embeddings."""
    more = {"--lora-rank": str(LORA_RANK), "--lora-alpha": str(LORA_ALPHA)}
    yield from _started("generator-lora", tied_model_dir, tmp_path_factory, more)


@pytest.fixture
def mortal(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaProcess]:
    """Return a replica of one test's own, to be killed by it."""
    yield from _started("generator-2", model_dir, tmp_path_factory)


def _started(
    replica_id: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory, more: dict[str, str] | None = None
) -> Iterator[ReplicaProcess]:
    process = ReplicaProcess(replica_id, model_dir, tmp_path_factory.mktemp(replica_id) / "log", more=more)
    try:
        process.wait_until_up()
        yield process
    finally:
        process.kill()


@pytest.fixture
async def incarnation(redis: Redis, run_keys: RunKeys) -> int:
    """Return the trainer's incarnation, higher than any other test's: the replicas outlive the tests."""
    number = next(_INCARNATIONS)
    await redis.set(run_keys.epoch, number)
    return number


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return a sender of that incarnation."""
    sender = make_sender(redis, incarnation)
    yield sender
    await sender.close()


def make_sender(redis: Redis, incarnation: int) -> WeightSender:
    """Return a sender that cuts chunks in the middle of layers."""
    return WeightSender(
        redis,
        run_id=RUN_ID,
        internal_key=KEY,
        transport="gloo",
        push_timeout_s=PUSH_TIMEOUT_S,
        incarnation=incarnation,
        buffer_bytes=20_000,
    )
