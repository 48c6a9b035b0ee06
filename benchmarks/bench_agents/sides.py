"""The two sides. Each has its own engine, and one is idle while the other works.

bare       client --chat completions--> vLLM's OpenAI server
sessions   client --chat completions--> sessions service --turns--> generator
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import local_generator
from benchmarks.bench_agents import never_end
from benchmarks.local_generator import child
from headrace.local import cpu_placement
from headrace.local.held_port import HeldPort

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Side:
    """One side as the client uses it.

    Attributes:
        http: Client of this side, with its key.
        processes: The servers, for their CPU time.
        run_id: Run to open sessions for; empty if turns go straight to ``url``.
    """

    url: str
    http: httpx.AsyncClient
    processes: "list[subprocess.Popen[bytes]]"
    run_id: str = ""

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[tuple[str, dict[str, str]]]:
        """Yield the base URL of a session, and the headers with its key."""
        if not self.run_id:
            yield f"{self.url}/v1", {}
            return
        opened = (await self.http.post(f"{self.url}/v1/sessions", json={"run_id": self.run_id})).raise_for_status()
        session = opened.json()
        headers = {"authorization": f"Bearer {session['api_key']}"}
        yield session["base_url"], headers
        (await self.http.post(f"{session['base_url']}/end", headers=headers)).raise_for_status()


@contextlib.contextmanager
def vllm_server(
    directory: Path, *, model: Path, engine_args: Mapping[str, Any], has_cuda: bool
) -> "Generator[tuple[str, subprocess.Popen[bytes]]]":
    """Run vLLM's OpenAI server, and yield its URL and process."""
    port = HeldPort()
    port.let_bind()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port.number), "--model", str(model), "--served-model-name", "policy"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--max-num-seqs", str(engine_args["max_num_seqs"]), "--logits-processors", never_end.NAME]
    command += ["--generation-config", "vllm", "--disable-log-stats"]
    command += ["--gpu-memory-utilization", "0.4"] if has_cuda else ["--dtype", "float32", "--enforce-eager"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(_REPOSITORY),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not has_cuda:
        cores = local_generator.worker_placement()[cpu_placement.WORKER_CORES]
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    log, url = directory / "vllm.log", f"http://127.0.0.1:{port.number}"
    with port, child(command, log, environment) as process:
        _until_healthy(f"{url}/health", process, log)
        yield url, process


@contextlib.contextmanager
def sessions_service(directory: Path, *, redis_url: str) -> "Generator[tuple[str, subprocess.Popen[bytes]]]":
    """Run the sessions service as `headrace up` does, and yield its URL and process."""
    port = HeldPort()
    port.let_bind()
    environment = {
        **os.environ,
        "HEADRACE_REDIS_URL": redis_url,
        "HEADRACE_PORT": str(port.number),
        "HEADRACE_API_KEY": local_generator.KEY,
        "HEADRACE_INTERNAL_KEY": local_generator.KEY,
        "HEADRACE_REPLICA_ID": "sessions-0",
        "HEADRACE_LOG_LEVEL": "WARNING",
        "HEADRACE_TOOL_PATH": str(Path(__file__).parent),
        "PYTHONPATH": str(_REPOSITORY),
    }
    log, url = directory / "sessions.log", f"http://127.0.0.1:{port.number}"
    with port, child([sys.executable, "-m", "services.sessions"], log, environment) as process:
        _until_healthy(f"{url}/readyz", process, log)
        yield url, process


def _until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + local_generator.START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).is_success:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{url} did not come up:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)
