"""Starts what generator benchmarks need: Redis, a real generator process, and a run for it to serve.

    redis_server --> generator --> begin_run --> a WeightSender's push --> prompts in, completions out

Everything uses loopback and is stopped when its context ends.
"""

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.local import cpu_placement, embedded_redis
from headrace.local.held_port import HeldPort
from shared.arrays import pack_ids
from shared.messages import PromptGroup, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig

KEY = "key-of-a-benchmark"
INCARNATION = 1
"""Incarnation of the trainer that the benchmark takes the place of."""
START_S = 600.0
_REPOSITORY = Path(__file__).resolve().parents[1]
_PASSWORD = "bench"


@dataclass
class GeneratorProcess:
    """A running `python -m services.generator`."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Exit the benchmark if the generator process has ended."""
        if self.process.poll() is not None:
            raise SystemExit(f"the generator ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")


@contextlib.asynccontextmanager
async def redis_server(directory: Path) -> AsyncGenerator[tuple[Redis, str]]:
    """Run the same Redis server as `headrace up`, and yield a client and the URL."""
    data = directory / "redis"
    data.mkdir(parents=True)
    port = HeldPort()
    port.let_bind()
    config = embedded_redis.write_config(data, port=port.number, password=_PASSWORD)
    command = [str(embedded_redis.server_binary()), str(config)]
    url = embedded_redis.url(port.number, _PASSWORD)
    with port, child(command, directory / "redis.log", os.environ):
        redis = connect(url)
        try:
            await wait_until_ready(redis, timeout_s=START_S)
            yield redis, url
        finally:
            await redis.aclose()


@contextlib.contextmanager
def generator(directory: Path, *, redis_url: str, engine_args: Mapping[str, Any]) -> Generator[GeneratorProcess]:
    """Start a generator as `headrace up` does, with additional engine arguments. The run names its model."""
    environment = {
        **os.environ,
        "HEADRACE_REDIS_URL": redis_url,
        "HEADRACE_PORT": "0",
        "HEADRACE_API_KEY": KEY,
        "HEADRACE_INTERNAL_KEY": KEY,
        "HEADRACE_REPLICA_ID": "generator-0",
        "HEADRACE_LOG_LEVEL": "WARNING",
        "HEADRACE_ENGINE_ARGS": json.dumps(dict(engine_args)),
        "PYTHONPATH": str(_REPOSITORY),
        **worker_placement(),
    }
    log = directory / "generator.log"
    with child([sys.executable, "-m", "services.generator"], log, environment) as process:
        yield GeneratorProcess(process, log)


def worker_placement() -> dict[str, str]:
    """Return the variables by which `headrace up` places vLLM's worker on its own cores; none with a GPU.

    Variables that the environment already has are kept.
    """
    if cpu_placement.has_gpu(os.environ):
        return {}
    if chosen := os.environ.get(cpu_placement.WORKER_CORES):
        return {cpu_placement.WORKER_CORES: chosen}
    (variables,), _ = cpu_placement.place(cpu_placement.available_cores(), num_generators=1)
    return variables


async def begin_run(redis: Redis, run_id: str, config: RunConfig) -> RunKeys:
    """Create a run and make it the current one."""
    store = RunStore(redis)
    await store.create(run_id, config, run_dir="none")
    await store.set_status(run_id, "running")
    keys = RunKeys(run_id)
    await redis.set(keys.epoch, INCARNATION)
    await store.set_current_run(run_id)
    return keys


async def add_prompts(redis: Redis, keys: RunKeys, prompts: Sequence[Sequence[int]], *, first: int, size: int) -> None:
    """Add prompt groups of ``size`` completions to the prompts stream, numbered from ``first`` on."""
    pipeline = redis.pipeline(transaction=False)
    for number, prompt_ids in enumerate(prompts, first):
        group = PromptGroup(keys.run_id, f"{number:08d}", "prompt", pack_ids(prompt_ids), {}, size)
        pipeline.xadd(keys.prompts, {"group_id": group.group_id, "payload": encode(group)})
    await pipeline.execute()


async def push_weights(redis: Redis, keys: RunKeys, model: Path, running: GeneratorProcess) -> None:
    """Push a model's weights to the generator as version 0."""
    import safetensors.torch

    from services.trainer.push.push_settings import PushSettings
    from services.trainer.push.weight_sender import WeightSender

    reader: Any = safetensors.torch  # partly untyped
    weights: dict[str, Any] = reader.load_file(model / "model.safetensors")
    settings = PushSettings(
        run_id=keys.run_id, internal_key=KEY, transport="gloo", push_timeout_s=60.0, incarnation=INCARNATION
    )
    sender = WeightSender(redis, settings)
    try:
        await until_pushed(sender, weights.items, running)
    finally:
        await sender.close()


async def until_pushed(sender: Any, weights: Any, running: GeneratorProcess) -> None:
    """Push version 0 repeatedly until the generator, which must load its model first, holds it."""
    deadline = time.monotonic() + START_S
    while True:
        running.check()
        result = await sender.push(weights, policy_version=0)
        if result.members:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"no generator took the weights: {result.failed}\n{running.log.read_text()[-3000:]}")
        await asyncio.sleep(0.5)


@contextlib.contextmanager
def child(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> "Generator[subprocess.Popen[bytes]]":
    """Run a command from the repository's root, and stop it when the context ends."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=_REPOSITORY, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds() -> float:
    """Return the CPU time that this process and all its descendants have used since they started, in seconds."""
    psutil: Any = importlib.import_module("psutil")  # untyped
    own = psutil.Process()
    seconds = 0.0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += float(times.user + times.system)
    return seconds


def end_in_order() -> None:
    """Make SIGTERM exit this process through its contexts, so that it stops everything that it has started."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def say(what: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)
