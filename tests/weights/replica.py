"""Starts replica_process.py, and sends requests to it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from shared.control import WEIGHTS_PATH, ReplicaInfo
from shared.lineage import LineageVersion
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from tests.kept_ports import kept_port
from tests.plain_http import NO_TLS

RUN_ID = "run-test"
KEY = "key-of-the-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
START_TIMEOUT_S = 240.0
_LEASE_S = 3600.0


@dataclass(frozen=True)
class Sample:
    """The engine's sample; spans are (version, start, end)."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]


class ReplicaProcess:
    """One replica with a real engine."""

    def __init__(
        self,
        replica_id: str,
        model_dir: Path,
        log_path: Path,
        *,
        more: dict[str, str] | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.url = f"http://127.0.0.1:{kept_port()}"
        self._log_path = log_path
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # By default, vLLM puts the worker on the first core of a NUMA node. Two replicas would share it, even if
            # others are idle, and a replica of two workers would need a second node.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **(variables or {}),
        }
        arguments = {
            "--model": str(model_dir),
            "--replica-id": replica_id,
            "--run-id": RUN_ID,
            "--port": self.url.rpartition(":")[2],
            "--key": KEY,
            **(more or {}),
        }
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("replica_process.py")), *sum(arguments.items(), ())],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def wait_until_up(self) -> None:
        """Wait for the engine."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.is_alive(), f"{self.replica_id} ended: {self._log_path.read_text()[-4000:]}"
            with contextlib.suppress(httpx.TransportError):
                info = self.info()
                assert info.replica_id == self.replica_id, f"{info.replica_id} answers at {self.url}"
                return
            time.sleep(0.2)
        raise AssertionError(f"{self.replica_id} did not start: {self._log_path.read_text()[-4000:]}")

    def info(self) -> ReplicaInfo:
        """Return its description of itself."""
        response = httpx.get(f"{self.url}{WEIGHTS_PATH}", headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS)
        return ReplicaInfo.model_validate_json(response.raise_for_status().content)

    async def sample(self, prompt_ids: list[int], *, max_tokens: int) -> Sample:
        """Sample one completion."""
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS) as client:
            response = await client.post(f"{self.url}/probe", json={"prompt_ids": prompt_ids, "max_tokens": max_tokens})
        body = response.raise_for_status().json()
        spans = [(LineageVersion.parse(version).policy_version, start, end) for version, start, end in body["spans"]]
        return Sample(body["token_ids"], body["logprobs"], spans)

    async def attach(self, *, push_staging: str = "memory", kv_after_push: str = "recompute") -> None:
        """Make it receive for the run with these options, without weights at first."""
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS) as client:
            options = {"push_staging": push_staging, "kv_after_push": kv_after_push}
            (await client.post(f"{self.url}/attach", json=options)).raise_for_status()

    async def set_fault(self, fault: str) -> None:
        """Make it load weights wrong; see faulty_worker.py."""
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS) as client:
            (await client.post(f"{self.url}/fault", json={"fault": fault})).raise_for_status()

    async def hold_probes(self, is_held: bool) -> None:
        """Make probes wait until this is turned off."""
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS) as client:
            (await client.post(f"{self.url}/hold-probes", json={"is_held": is_held})).raise_for_status()

    async def is_at_probe(self) -> bool:
        """Return whether a probe is waiting."""
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False, verify=NO_TLS) as client:
            return bool((await client.get(f"{self.url}/is-at-probe")).raise_for_status().json())

    async def register(self, redis: Redis, keys: RunKeys) -> None:
        """Register it as a generator does, for longer than any test takes."""
        await redis.hset(keys.generators, self.replica_id, f'{{"url": "{self.url}"}}')
        await lease.renew(redis, leases=keys.leases(GENERATORS), consumer=self.replica_id, lease_s=_LEASE_S)

    def signal_all(self, number: int) -> None:
        """Send a signal to the replica, its engine core and its worker."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL, including its children, which may outlive it for a moment."""
        self.signal_all(signal.SIGKILL)
        self._process.wait(timeout=120)
