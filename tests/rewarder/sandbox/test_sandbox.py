"""A program in a real sandbox can compute, but has no other effect."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from services.rewarder.sandbox.bubblewrap import BubblewrapSandbox, usable_python
from services.rewarder.sandbox.sandbox import Finished, Limits, SandboxUnavailableError
from tests.rewarder.conftest import ROOT

LIMITS = Limits(wall_s=60.0, cpu_s=2)


async def said_by(bwrap: str, program: str, limits: Limits = LIMITS) -> str:
    finished = await BubblewrapSandbox(bwrap=bwrap).run(program, limits=limits)
    assert (finished.ended, finished.exit_code) == ("exited", 0), finished
    return finished.stdout.decode()


async def test_a_program_computes_reads_its_input_and_is_process_1(bwrap: str) -> None:
    sandbox = BubblewrapSandbox(bwrap=bwrap)
    program = "import os, sys; print(os.getpid(), 6 * int(sys.stdin.read()))"
    assert await sandbox.run(program, stdin=b"7", limits=LIMITS) == Finished("exited", 0, b"1 42\n", b"")


async def test_an_endless_loop_ends_with_its_processor_time(bwrap: str) -> None:
    started_at = time.monotonic()
    finished = await BubblewrapSandbox(bwrap=bwrap).run("while True: pass", limits=Limits(wall_s=100.0, cpu_s=1))
    assert finished.ended == "exited"
    assert finished.exit_code != 0
    assert time.monotonic() - started_at < 100.0


async def test_sleeping_past_the_wall_clock_is_cut_off_and_nothing_of_it_is_left(bwrap: str) -> None:
    mark = f"sleeper-of-{os.getpid()}"
    program = (
        f"import subprocess, time; subprocess.Popen(['sleep', '1000', '{mark}'][:2]); x = '{mark}'; time.sleep(1000)"
    )
    finished = await BubblewrapSandbox(bwrap=bwrap).run(program, limits=Limits(wall_s=1.0))
    assert (finished.ended, finished.exit_code) == ("wall clock", None)
    for _ in range(500):
        if not processes_with(mark):
            break
        await asyncio.sleep(0.02)
    assert processes_with(mark) == []


async def test_two_gigabytes_are_refused(bwrap: str) -> None:
    program = "try:\n    bytearray(2 << 30)\nexcept MemoryError:\n    print('refused')"
    assert await said_by(bwrap, program) == "refused\n"


async def test_a_fork_bomb_stops_at_its_limit_however_many_processes_we_have(bwrap: str) -> None:
    program = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    print(children)
"""
    assert int(await said_by(bwrap, program, Limits(wall_s=60.0, processes=20))) == 19


async def test_there_is_no_network(bwrap: str) -> None:
    with_listener = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with with_listener:
        port = with_listener.sockets[0].getsockname()[1]
        program = f"""
import socket
for place in (("127.0.0.1", {port}), ("1.1.1.1", 80)):
    try:
        socket.create_connection(place, timeout=5)
        print("connected")
    except OSError as error:
        print("refused")
print([name for _, name in socket.if_nameindex()])
"""
        assert await said_by(bwrap, program) == "refused\nrefused\n['lo']\n"


async def test_files_of_the_host_are_not_there(bwrap: str) -> None:
    here = Path(__file__)
    program = f"""
import os
for path in ("/etc/shadow", "/etc/passwd", "/root", "/home", "/tmp", "/var", {str(here)!r}):
    print(os.path.exists(path))
print(sorted(os.listdir("/")))
for path in ("/usr/x", "/x", "/dev/x", "/proc/sys/kernel/hostname"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError:
        print("refused")
"""
    lines = (await said_by(bwrap, program)).splitlines()
    assert lines[:7] == ["False"] * 7
    assert set(eval(lines[7])) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "root", "sbin", "scratch", "usr", "opt", "home",
    }  # fmt: skip
    assert lines[8:] == ["refused"] * 4


async def test_a_file_of_100_megabytes_stops_at_8_and_many_small_ones_at_16(bwrap: str) -> None:
    program = """
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def write(name, megabytes):
    with open(name, "wb", buffering=0) as file:
        for _ in range(megabytes):
            if file.write(bytes(1 << 20)) != 1 << 20:
                return
try:
    write("large", 100)
except OSError:
    pass
print(os.path.getsize("large") >> 20)
os.remove("large")
try:
    for number in range(100):
        write(str(number), 1)
except OSError:
    print(number)
try:
    write("/dev/shm/x", 8)
except OSError:
    pass
print(os.path.getsize("/dev/shm/x") >> 20)
"""
    assert await said_by(bwrap, program) == "8\n16\n1\n"


async def test_kill_reaches_nothing_outside_and_not_process_1(bwrap: str) -> None:
    program = f"""
import os, signal, subprocess, sys
child = "import os, signal; os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGTERM)"
subprocess.run([sys.executable, "-I", "-c", child])
try:
    os.kill({os.getpid()}, 0)
    print("seen")
except ProcessLookupError:
    print("not there")
print("alive", sorted(name for name in os.listdir("/proc") if name.isdigit()))
"""
    assert await said_by(bwrap, program) == "not there\nalive ['1']\n"


async def test_the_environment_is_empty(bwrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "canary")
    names = set((await said_by(bwrap, "import os; print(*os.environ)")).split())
    assert names <= {"PATH", "PWD", "LC_CTYPE"}


async def test_a_flood_of_output_is_cut_off(bwrap: str) -> None:
    program = "while True: print('x' * 1000)"
    finished = await BubblewrapSandbox(bwrap=bwrap).run(program, limits=LIMITS)
    assert (finished.ended, len(finished.stdout)) == ("output", 64 << 10)


async def test_there_are_no_namespaces_and_no_rights_within(bwrap: str) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for kind in (0x10000000, 0x20000, 0x40000000):  # user, mount, network
    print(libc.unshare(kind))
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(status["CapEff"].strip(), status["CapBnd"].strip(), status["NoNewPrivs"].strip())
try:
    os.setuid(0)
    print("root")
except OSError:
    print("refused")
"""
    said = await said_by(bwrap, program)
    assert said == "-1\n-1\n-1\n0000000000000000 0000000000000000 1\nrefused\n"


async def test_limits_cannot_be_lifted(bwrap: str) -> None:
    program = """
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("lifted")
except ValueError:
    print(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)
"""
    assert await said_by(bwrap, program) == "512\n"


def test_a_worker_s_own_limits_do_not_break_it(bwrap: str) -> None:
    """A worker has hard limits on memory and files. Its child processes inherit them and cannot raise them."""
    program = (
        "import asyncio, resource\n"
        "from services.rewarder.sandbox.bubblewrap import BubblewrapSandbox\n"
        "from services.rewarder.sandbox.sandbox import Limits\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        f"sandbox = BubblewrapSandbox(bwrap={bwrap!r})\n"
        "finished = asyncio.run(sandbox.run('print(7)', limits=Limits(wall_s=60, open_files=64)))\n"
        "print(finished)\n"
        "print(sandbox.why_too_much(Limits(memory_bytes=400 << 20)), sandbox.why_too_much(Limits()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    ended, said = done.stdout.splitlines()
    assert ended == str(Finished("exited", 0, b"7\n", b"")), done.stderr
    assert said.startswith("None has an option 'memory_mib' of 512, which is more than the 400 MiB of a reward worker")


async def test_a_python_that_is_named_by_a_link_is_found(bwrap: str, tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(usable_python())
    finished = await BubblewrapSandbox(bwrap=bwrap, python=str(link)).run("print(7)", limits=LIMITS)
    assert finished == Finished("exited", 0, b"7\n", b"")


async def test_without_bubblewrap_nothing_is_run() -> None:
    with pytest.raises(SandboxUnavailableError, match="bubblewrap is not installed where the rewarder runs: install"):
        await BubblewrapSandbox(bwrap="/nowhere/bwrap").run("print(1)", limits=LIMITS)


async def test_a_bubblewrap_that_does_not_start_cannot_be_the_sandbox(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("not a program")
    with pytest.raises(SandboxUnavailableError, match="bubblewrap could not be started"):
        await BubblewrapSandbox(bwrap=str(broken)).run("print(1)", limits=LIMITS)


def processes_with(mark: str) -> list[int]:
    found: list[int] = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "cmdline").read_bytes() and int(directory.name) != os.getpid():
                found.append(int(directory.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have just run as a user without rights")
def test_a_service_that_is_not_root_has_a_sandbox_too(bwrap: str) -> None:
    program = (
        "import asyncio, os\n"
        "from services.rewarder.sandbox.bubblewrap import BubblewrapSandbox\n"
        "from services.rewarder.sandbox.sandbox import Limits\n"
        f"sandbox = BubblewrapSandbox(bwrap={bwrap!r})\n"
        "finished = asyncio.run(sandbox.run('import os; print(os.getpid())', limits=Limits(wall_s=60)))\n"
        "print(os.geteuid(), finished)\n"
    )
    with tempfile.TemporaryDirectory(prefix="headrace-not-root-") as directory:  # where the sandbox's user can read
        Path(directory).chmod(0o755)
        shutil.copytree(ROOT / "services" / "rewarder" / "sandbox", f"{directory}/services/rewarder/sandbox")
        done = subprocess.run(
            [usable_python(), "-c", program],
            cwd=directory, env={"PATH": os.environ["PATH"]}, user=61_999, group=61_999, extra_groups=[],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.stdout == f"61999 {Finished('exited', 0, b'1' + chr(10).encode(), b'')}\n", done.stderr


@pytest.mark.parametrize("wall_s", [0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05])
async def test_a_sandbox_that_is_ended_while_it_is_being_set_up_leaves_nothing_behind(
    bwrap: str, wall_s: float
) -> None:
    mark = f"early-of-{os.getpid()}-{wall_s}"
    sandbox = BubblewrapSandbox(bwrap=bwrap)
    finished = await asyncio.gather(
        *(sandbox.run(f"import time; time.sleep(1000)  # {mark}", limits=Limits(wall_s=wall_s)) for _ in range(8))
    )
    assert {one.ended for one in finished} == {"wall clock"}
    for _ in range(500):
        if not processes_with(mark):
            break
        await asyncio.sleep(0.02)
    assert processes_with(mark) == []
