"""The generator as a supervisor sees it: a process with an HTTP port, children and an exit code."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.redis.keys import GENERATORS, REFUSALS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from shared.service.child_secrets import SECRETS
from shared.service.logs import last_message
from tests.eventually import eventually
from tests.kept_ports import kept_port
from tests.plain_http import NO_TLS
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


class Generator:
    """A generator process, with functions to observe it from outside."""

    def __init__(self, redis_url: str, log: Path, **environment: str) -> None:
        self.port = kept_port()
        self.log = log
        self._errors = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.generator"],
            cwd=REPOSITORY,
            stdout=self._errors,
            stderr=self._errors,
            env={
                # An engine of this process's own leaves variables, such as the file for its failures.
                **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
                "HEADRACE_REDIS_URL": redis_url,
                "HEADRACE_PORT": str(self.port),
                "HEADRACE_API_KEY": "public",
                "HEADRACE_INTERNAL_KEY": "internal",
                "HEADRACE_REPLICA_ID": "generator-0",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )

    def get(self, path: str, *, key: str = "") -> httpx.Response | None:
        """Return the response, or None while nothing listens."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with contextlib.suppress(httpx.NetworkError):
            url = f"http://127.0.0.1:{self.port}{path}"
            return httpx.get(url, headers=headers, timeout=120, trust_env=False, verify=NO_TLS)
        return None

    def reason(self) -> str:
        """Return what /readyz says the generator is waiting for."""
        answer = self.get("/readyz")
        return "" if answer is None else str(answer.json().get("reason", ""))

    def until(self, condition: Callable[[], Any], *, within_s: float = 240.0) -> None:
        """Wait for ``condition``; fail with the log if the process ends or the time is up."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, (
                f"waited {within_s} s, it says {self.reason()!r}:\n{self.log.read_text()}"
            )
            time.sleep(0.05)

    def descendants(self) -> set[int]:
        """Return the process ids of all its descendants."""
        parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {self.process.pid}

    def engine(self) -> set[int]:
        """Return the process ids of the engine core and its workers."""
        return {pid for pid in self.descendants() if "VLLM::" in _title(pid)}

    def secrets_of_children(self) -> list[str]:
        """Return the variables of its descendants that contain a key or the address of Redis."""
        lines = [line for pid in self.descendants() for line in _environment(pid).split("\0")]
        return [line for line in lines if line.partition("=")[0] in SECRETS]

    def ended(self, *, within_s: float) -> int:
        """Return the exit code."""
        return self.process.wait(timeout=within_s)

    def clear_away(self) -> None:
        for child in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.kill()
        self.process.wait(timeout=120)
        self._errors.close()


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Generator]]:
    started: list[Generator] = []

    def make(**environment: str) -> Generator:
        url = environment.pop("HEADRACE_REDIS_URL", redis_url)
        started.append(Generator(url, tmp_path / f"generator-{len(started)}.log", **environment))
        return started[-1]

    yield make
    for generator in started:
        generator.clear_away()


def a_config(model: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": str(model), "dataset_name": "/x.jsonl", "reward_funcs": ["accuracy_reward"],
         "max_prompt_length": 16, "max_completion_length": 16} | changes
    )  # fmt: skip


async def point_fleet_at(redis: Redis, run_id: str, config: RunConfig) -> RunKeys:
    store = RunStore(redis)
    await store.create(run_id, config, run_dir="/nowhere")
    await store.set_status(run_id, "running")
    await store.set_current_run(run_id)
    return RunKeys(run_id)


async def test_it_follows_the_current_run_and_starts_engines_only_when_it_must(
    start: Callable[..., Generator], redis: Redis, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    untrusted = make_tiny_model(tmp_path / "untrusted")
    config_json = untrusted / "config.json"
    config_json.write_text(config_json.read_text().replace("{", '{"auto_map": {"AutoConfig": "code.Config"},', 1))
    generator = start()
    generator.until(lambda: generator.get("/livez"), within_s=120)
    generator.until(lambda: generator.reason() == "no run to serve")
    policy = generator.get("/v1/models", key="public")
    assert policy is not None
    assert policy.status_code == 503

    # A model with its own code is refused, and the replica goes on to the next run.
    keys = await point_fleet_at(redis, "run-1", a_config(untrusted))
    generator.until(lambda: generator.reason() == "this run's model cannot be loaded")
    policy = generator.get("/v1/models", key="public")
    assert policy is not None
    assert "auto_map" in policy.json()["detail"]
    assert await redis.hkeys(keys.generators) == [b"generator-0"]

    async def is_reported() -> bool:
        return bool(await redis.hlen(keys.refusals))

    await eventually(is_reported)  # it is written just after /readyz has changed
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert (refusal.kind, refusal.replica_id) == ("generator", "generator-0")
    assert "auto_map" in refusal.reason
    refused = keys

    keys = await point_fleet_at(redis, "run-2", a_config(model))
    generator.until(lambda: generator.reason() == "waiting for weights")
    entry = f'{{"url":"http://127.0.0.1:{generator.port}"}}'.encode()

    async def is_served() -> bool:
        return await redis.hget(keys.generators, "generator-0") == entry

    await eventually(is_served)  # the entry is written just after /readyz has changed
    assert await alive(redis, leases=keys.leases(GENERATORS)) == {"generator-0"}
    assert await redis.hgetall(refused.refusals) == {}
    weights = generator.get("/internal/v1/weights", key="internal")
    assert weights is not None
    assert weights.json()["run_id"] == "run-2"
    assert weights.json()["transports"] == ["gloo", "disk"]
    first_engine = generator.engine()
    assert len(first_engine) == 1, "the engine core, which is its own worker"
    assert generator.secrets_of_children() == []

    # For the same model, the engine is kept. For longer completions, it must be replaced.
    await point_fleet_at(redis, "run-3", a_config(model, learning_rate=0.1))
    generator.until(
        lambda: (generator.get("/internal/v1/weights", key="internal") or weights).json()["run_id"] == "run-3"
    )
    assert generator.engine() == first_engine
    assert await redis.hkeys(keys.generators) == []
    assert await alive(redis, leases=keys.leases(GENERATORS)) == set()
    keys = await point_fleet_at(redis, "run-4", a_config(model, max_completion_length=32))
    generator.until(lambda: generator.reason() == "loading the model")
    generator.until(lambda: generator.reason() == "waiting for weights")
    second_engine = generator.engine()
    assert not second_engine & first_engine

    generator.process.send_signal(signal.SIGTERM)
    assert generator.ended(within_s=60) == 0, generator.log.read_text()
    assert await alive(redis, leases=keys.leases(GENERATORS)) == set()
    assert await redis.hkeys(keys.generators) == []
    # They are killed now, but it may take the kernel a moment to remove them.
    assert not survivors_of(second_engine, within_s=60)


async def test_a_generator_killed_while_loading_leaves_no_child(
    start: Callable[..., Generator], redis: Redis, tmp_path: Path
) -> None:
    await point_fleet_at(redis, "run-1", a_config(make_tiny_model(tmp_path / "model")))
    generator = start()
    generator.until(generator.engine)
    children = generator.descendants()
    generator.process.kill()
    # A child checks for its parent once it has imported its modules.
    assert not survivors_of(children, within_s=120)


async def test_asked_to_stop_while_loading_it_stops(
    start: Callable[..., Generator], redis: Redis, tmp_path: Path
) -> None:
    await point_fleet_at(redis, "run-1", a_config(make_tiny_model(tmp_path / "model")))
    generator = start()
    generator.until(generator.engine)
    children = generator.descendants()
    generator.process.send_signal(signal.SIGTERM)
    assert generator.ended(within_s=60) == 0, generator.log.read_text()
    assert not survivors_of(children, within_s=60)


async def test_a_dead_engine_ends_the_process_with_a_sentence(
    start: Callable[..., Generator], redis: Redis, tmp_path: Path
) -> None:
    keys = await point_fleet_at(redis, "run-1", a_config(make_tiny_model(tmp_path / "model")))
    core = max(os.sched_getaffinity(0))
    generator = start(VLLM_CPU_OMP_THREADS_BIND=str(core))
    generator.until(lambda: generator.reason() == "waiting for weights")
    (engine,) = generator.engine()
    assert "EngineCore" in _title(engine), "it is its own worker"
    assert os.sched_getaffinity(engine) == {core}, "it runs on the chosen cores"
    os.kill(engine, signal.SIGKILL)
    assert generator.ended(within_s=120) == 1
    assert "vLLM's engine died" in generator.log.read_text()
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert refusal.reason.startswith("it ended, saying: vLLM's engine died: its process EngineCore")
    assert "was killed by SIGKILL" in refusal.reason
    assert "vLLM's engine died" in last_message(generator.log.read_text().splitlines())
    assert await alive(redis, leases=keys.leases(GENERATORS)) == set()


async def test_the_reason_why_vllms_own_processes_refuse_an_option_is_shown_with_the_run(
    start: Callable[..., Generator], redis: Redis, tmp_path: Path
) -> None:
    """Check what vLLM tells this process: only that the root cause is in the log above."""
    keys = await point_fleet_at(redis, "run-1", a_config(make_tiny_model(tmp_path / "model")))
    generator = start(VLLM_CPU_KVCACHE_SPACE="1000000")
    assert generator.ended(within_s=240) == 1
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert "vLLM could not start" in refusal.reason
    assert "root cause above" not in refusal.reason
    assert "kv cache allocation is less than requested" in refusal.reason


async def test_an_engine_argument_vllm_does_not_know_is_the_operators_mistake(
    start: Callable[..., Generator], redis: Redis
) -> None:
    generator = start(HEADRACE_ENGINE_ARGS='{"max_num_sequences": 4}')
    assert generator.ended(within_s=120) == 2
    assert "vLLM has no engine argument max_num_sequences" in generator.log.read_text()
    assert "Traceback" not in generator.log.read_text()
    (refusal,) = decode_refusals(await redis.hgetall(REFUSALS))
    assert "vLLM has no engine argument max_num_sequences" in refusal.reason


async def test_without_redis_it_gives_up_with_a_sentence(start: Callable[..., Generator]) -> None:
    away = f"redis://127.0.0.1:{kept_port()}/0"
    generator = start(HEADRACE_REDIS_URL=away, HEADRACE_REDIS_PATIENCE_S="2", HEADRACE_LOG_LEVEL="CRITICAL")
    assert generator.ended(within_s=120) == 1
    assert "Redis PING failed for 2 s" in generator.log.read_text()
    assert "Traceback" not in generator.log.read_text()


async def test_a_taken_port_is_the_operators_mistake(start: Callable[..., Generator]) -> None:
    first = start()
    first.until(lambda: first.get("/livez"), within_s=120)
    second = start(HEADRACE_PORT=str(first.port))
    assert second.ended(within_s=120) == 2
    assert f"cannot listen on 127.0.0.1:{first.port}" in second.log.read_text()


def survivors_of(pids: set[int], *, within_s: float) -> list[str]:
    """Return the titles of the processes that still run after ``within_s``."""
    deadline = time.monotonic() + within_s
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [_title(pid) for pid in running]


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _stat(pid: int) -> list[str]:
    """Return state, parent and the other fields of a process; an empty list if the process does not exist."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _environment(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def _parent(pid: int) -> int:
    stat = _stat(pid)
    return int(stat[1]) if stat else 0


def _runs(pid: int) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] != "Z"
