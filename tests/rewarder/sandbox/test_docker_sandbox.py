"""The sandbox of a real Docker engine. It needs the package, an engine and the image."""

import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from services.rewarder.built_ins import code_execution
from services.rewarder.built_ins.code_execution import code_execution_reward
from services.rewarder.sandbox.chosen import DEFAULT_IMAGE
from services.rewarder.sandbox.docker_container import DockerSandbox
from services.rewarder.sandbox.sandbox import Limits

IMAGE = os.environ.get("HEADRACE_SANDBOX_IMAGE", DEFAULT_IMAGE)
LIMITS = Limits(wall_s=100.0, cpu_s=2)


@pytest.fixture
def sandbox() -> Iterator[DockerSandbox]:
    docker: Any = pytest.importorskip("docker")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the SDK leaves a socket open if nothing answers
        client, why_not = _client(docker)
        gc.collect()
    if client is None:
        pytest.skip(f"no Docker engine answers: {why_not}")
    try:
        if not client.images.list(name=IMAGE):
            pytest.skip(f"the Docker engine has no image {IMAGE}: pull it, or set HEADRACE_SANDBOX_IMAGE to one it has")
        yield DockerSandbox(image=IMAGE, client=client)
    finally:
        client.close()


def _client(docker: Any) -> tuple[Any, str]:
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except Exception as error:  # noqa: BLE001  the SDK raises its own, requests' and urllib3's
        return None, str(error)
    return client, ""


async def test_a_program_computes_reads_its_input_and_is_process_1(sandbox: DockerSandbox) -> None:
    finished = await sandbox.run("import os, sys; print(os.getpid(), sys.stdin.read())", stdin=b"7", limits=LIMITS)
    assert (finished.ended, finished.stdout, finished.stderr) == ("exited", b"1 7\n", b"")


async def test_a_program_has_a_scratch_directory_and_nothing_else(sandbox: DockerSandbox) -> None:
    program = """
import ctypes, os, socket
for path in ("/scratch/x", "/x", "/usr/x", "/dev/x"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
print(socket.if_nameindex(), os.getuid(), [ctypes.CDLL(None).unshare(kind) for kind in (0x10000000, 0x20000)])
print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))])
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
"""
    finished = await sandbox.run(program, limits=LIMITS)
    assert finished.stdout.decode().splitlines() == [
        "wrote /scratch/x",
        "[(1, 'lo')] 65534 [-1, -1]",
        "0000000000000000 0000000000000000 1",
        "refused",
    ]


async def test_a_program_that_does_not_end_or_floods_is_cut_off(sandbox: DockerSandbox) -> None:
    sleeping = await sandbox.run("import time; time.sleep(1000)", limits=Limits(wall_s=1.0))
    flooding = await sandbox.run("while True: print('x' * 1000)", limits=LIMITS)
    assert (sleeping.ended, flooding.ended, len(flooding.stdout)) == ("wall clock", "output", 64 << 10)


def test_code_is_judged_as_in_the_other_sandbox(sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def usable_sandbox() -> DockerSandbox:
        return sandbox

    monkeypatch.setattr(code_execution, "usable_sandbox", usable_sandbox)

    def judged(code: str, *tests: object) -> tuple[str, float | None]:
        (verdict,) = code_execution_reward([f"```python\n{code}\n```"], tests=[list(tests)], timeout_s=30.0)
        return verdict.outcome, verdict.value

    assert judged("def add(a, b): return a + b", "assert add(1, 2) == 3") == ("scored", 1.0)
    assert judged("def add(a, b): return 7", "assert add(1, 2) == 3") == ("scored", 0.0)
    assert judged("import os\nos._exit(0)", "assert add(1, 2) == 3") == ("scored", 0.0)
    assert judged("print(2 * int(input()))", {"input": "3", "output": "6"}) == ("scored", 1.0)
