"""Training ranks that start warm: each is forked from a process that has imported torch and transformers.

    test --module, arguments, environment, log--> this program --fork--> one keeper per rank --fork--> the rank
         <----------pid, and at its end its exit status-------------------------'

The imports are six of the seven seconds of processor time of a short run. What a rank does after them is the same: it
is a process of its own, which runs the module as ``python -m`` does. Tests that are about the start itself, or compare
two processes bit by bit, start their ranks cold (`incarnations.rank_process`).
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

from tests.shared_process import SharedProcess

REPOSITORY = Path(__file__).parents[2]
_MODULES = (
    "services.trainer.loop.assembly",
    "services.trainer.export.final_model",
    "services.trainer.policy.policy_core",
    "services.trainer.push.weight_sender",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


class WarmRank:
    """A rank, with the part of asyncio's interface of processes that tests use."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reader, self._writer = reader, writer

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(await self._reader.readline())
            self._writer.close()
        return self.returncode


async def start_warm(module: str, *arguments: str, environment: dict[str, str], log: Path) -> WarmRank:
    """Start a rank whose output is appended to ``log``. It is killed if nobody waits for it any more."""
    program = await asyncio.to_thread(_program)
    reader, writer = await asyncio.open_unix_connection(program.address)
    request = {"module": module, "arguments": arguments, "environment": environment, "log": str(log)}
    writer.write(json.dumps(request).encode() + b"\n")
    return WarmRank(int(await reader.readline()), reader, writer)


def run_group(module: str, *arguments: str, num_ranks: int, directory: Path, within_s: float = 200.0) -> None:
    """Run several ranks to their end, with a store like torchrun's, and assert that none fails.

    Their logs are in ``directory``. When one fails, the others are killed.
    """
    asyncio.run(_run_group(module, arguments, num_ranks, directory, within_s))


async def _run_group(module: str, arguments: tuple[str, ...], num_ranks: int, directory: Path, within_s: float) -> None:
    import torch.distributed

    c10d: Any = torch.distributed
    size, store = str(num_ranks), c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    group |= {"HEADRACE_COLLECTIVE_TIMEOUT_S": "60"}
    logs = [directory / f"rank-{rank}.log" for rank in range(num_ranks)]
    ranks: list[WarmRank] = []
    for number, log in enumerate(logs):
        environment = {**os.environ, **group, "RANK": str(number), "LOCAL_RANK": str(number)}
        ranks.append(await start_warm(module, *arguments, environment=environment, log=log))
    ends = [asyncio.create_task(_succeed(rank)) for rank in ranks]
    await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
    for rank in ranks:
        rank.kill()
    await asyncio.wait(ends)
    statuses = [rank.returncode for rank in ranks]
    said = "\n".join(f"{log.name}:\n{log.read_text()[-8000:]}" for log in logs)
    assert statuses == [0] * num_ranks, f"the ranks ended with {statuses}\n{said}"


async def _succeed(rank: WarmRank) -> None:
    assert await rank.wait() == 0


class _Program:
    """This module as a program, which forks ranks."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.address = f"{self._directory.name}/door"
        self._log = Path(self._directory.name) / "log"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.warm_ranks", self.address],
                cwd=REPOSITORY,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **threads},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            said = self._log.read_text()
            self.kill()
            raise AssertionError(f"no warm ranks: the program ended, and said: {said}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Have it end with its stdin, or kill it. Keepers end by themselves."""
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._directory.cleanup()


_PROGRAM = SharedProcess(_Program)
_STARTING = threading.Lock()
atexit.register(_PROGRAM.end)


def _program() -> _Program:
    """Return the program, which several ranks may ask for at once."""
    with _STARTING:
        return _PROGRAM.get()


def _serve(address: str) -> None:
    """Fork a keeper for each connection until stdin is closed."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while door in select.select([door, sys.stdin], [], [])[0]:
            connection, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _keep(connection)
            connection.close()
            while _has_reaped():
                pass
    while _has_reaped(wait=True):
        pass


def _has_reaped(*, wait: bool = False) -> bool:
    """Reap a keeper, if there is one, so that the processor time of its rank is counted."""
    try:
        return os.waitpid(-1, 0 if wait else os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _keep(connection: socket.socket) -> NoReturn:
    """Fork the rank, and tell its pid and how it ends. If the test has gone, kill the rank."""
    with connection, connection.makefile("r") as asked:
        request: dict[str, Any] = json.loads(asked.readline())
        pid = os.fork()
        if pid == 0:
            _become(**request)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{pid}\n".encode())
        end = os.pidfd_open(pid)
        if end not in select.select([end, connection.fileno()], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _become(*, module: str, arguments: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Run the module as ``python -m`` does."""
    with Path(log).open("ab") as output, Path(os.devnull).open("rb") as nothing:
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    for name in _MODULES:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has no threads"
    gc.freeze()
    _serve(sys.argv[1])
