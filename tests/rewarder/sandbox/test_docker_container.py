"""The requests to the Docker engine, and the meaning of its responses; the engine is fake."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.rewarder.sandbox.docker_container import DockerSandbox, container_options
from services.rewarder.sandbox.sandbox import Limits, SandboxUnavailableError

pytestmark = pytest.mark.unit

LIMITS = Limits(wall_s=30.0, output_bytes=1000)


class Made:
    """A container that was created this many seconds ago and was not started."""

    def __init__(self, seconds_ago: float) -> None:
        self.attrs = {"Created": int(time.time() - seconds_ago)}
        self.removed = 0

    def remove(self, *, force: bool) -> None:
        self.removed += 1
        raise RuntimeError(f"it is already being removed: {force}")


class PlayedEngine:
    """A client with one container, whose program is a function of its stdin."""

    def __init__(self, program: Any, *, url: str = "http+docker://localhost", made: "Iterable[Made]" = ()) -> None:
        self.containers = self
        self.api = SimpleNamespace(base_url=url)
        self._made = list(made)
        self.asked: dict[str, Any] = {}
        self.removed = 0
        self._program = program
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def list(self, *, all: bool, sparse: bool, filters: dict[str, Any]) -> "list[Made]":  # noqa: A002
        assert all
        assert sparse
        assert filters == {"label": ["headrace=sandbox"], "status": "created"}
        return self._made

    def create(self, image: str, **options: Any) -> "PlayedEngine":
        self.asked = {"image": image, **options}
        return self

    def attach_socket(self, params: dict[str, int]) -> socket.socket:
        assert params == {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        return self._ours

    def start(self) -> None:
        self._thread.start()

    def remove(self, *, force: bool) -> None:
        assert force
        self.removed += 1

    def close(self) -> None:
        self._ours.close()
        if self._thread.ident is not None:
            self._thread.join(timeout=120)
        self._theirs.close()

    def _play(self) -> None:
        received = b""
        while part := self._theirs.recv(4096):
            received += part
        for stream, content in self._program(received):
            try:
                self._theirs.sendall(struct.pack(">BxxxI", stream, len(content)) + content)
            except OSError:
                return
        self._theirs.shutdown(socket.SHUT_WR)


def says_nothing(_stdin: bytes) -> list[tuple[int, bytes]]:
    return []


async def run(program: Any, limits: Limits = LIMITS) -> tuple[Any, PlayedEngine]:
    engine = PlayedEngine(program)
    try:
        return await DockerSandbox(image="an-image", client=engine).run("print(1)", stdin=b"7", limits=limits), engine
    finally:
        engine.close()


def test_a_container_is_asked_for_with_nothing_that_it_does_not_need() -> None:
    options = container_options("print(1)", Limits(memory_bytes=1 << 29, processes=64, scratch_bytes=1 << 24))
    assert options["entrypoint"] + options["command"] == ["python3", "-I", "-c", "print(1)"]
    assert {name: options[name] for name in ("network_mode", "read_only", "cap_drop", "security_opt", "user")} == {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "user": "65534:65534",
    }
    assert (options["pids_limit"], options["mem_limit"], options["memswap_limit"]) == (64, 1 << 29, 1 << 29)
    assert options["tmpfs"] == {"/scratch": "size=16777216,uid=65534,gid=65534,mode=0700"}
    assert not {"volumes", "privileged", "devices", "cap_add", "ports"} & options.keys()


async def test_the_output_of_the_program_is_returned_by_stream_and_the_container_is_removed() -> None:
    def program(stdin: bytes) -> list[tuple[int, bytes]]:
        return [(1, b"got "), (2, b"warning"), (1, stdin)]

    finished, engine = await run(program)
    assert (finished.ended, finished.stdout, finished.stderr) == ("exited", b"got 7", b"warning")
    assert engine.removed == 1
    assert engine.asked["image"] == "an-image"
    assert engine.asked["command"][0].endswith("print(1)")
    assert "RLIMIT_AS" in engine.asked["command"][0]
    assert "RLIMIT_NPROC" not in engine.asked["command"][0], "all containers have one user"


async def test_a_flood_is_cut_off_and_the_container_removed() -> None:
    def flood(_stdin: bytes) -> Iterator[tuple[int, bytes]]:
        while True:
            yield 1, b"x" * 100

    finished, engine = await run(flood)
    assert (finished.ended, len(finished.stdout), engine.removed) == ("output", 1000, 1)


async def test_a_program_that_says_nothing_is_cut_off_by_the_clock() -> None:
    enough = threading.Event()

    def silent(_stdin: bytes) -> list[tuple[int, bytes]]:
        enough.wait(30)
        return []

    engine = PlayedEngine(silent)
    try:
        finished = await DockerSandbox(image="i", client=engine).run("", limits=Limits(wall_s=0.2))
    finally:
        enough.set()
        engine.close()
    assert (finished.ended, finished.exit_code, engine.removed) == ("wall clock", None, 1)


async def test_an_engine_that_creates_no_container_cannot_be_the_sandbox() -> None:
    class Refuses:
        containers: Any = None

        def __init__(self) -> None:
            self.containers = self
            self.api = SimpleNamespace(base_url="http+docker://localhost")

        def create(self, image: str, **_options: Any) -> None:
            raise RuntimeError(f"no such image: {image}")

    with pytest.raises(SandboxUnavailableError, match="not create a container of an-image: no such image: an-image"):
        await DockerSandbox(image="an-image", client=Refuses()).run("print(1)", limits=LIMITS)


async def test_an_engine_over_tls_is_refused_and_gets_no_program() -> None:
    engine = PlayedEngine(says_nothing, url="https://engine:2376")
    try:
        with pytest.raises(SandboxUnavailableError, match="https://engine:2376 is called over TLS"):
            await DockerSandbox(image="an-image", client=engine).run("print(1)", limits=LIMITS)
    finally:
        engine.close()
    assert engine.asked == {}


async def test_containers_that_killed_workers_never_started_are_removed_at_the_first_use() -> None:
    made = [Made(3600), Made(5), Made(120)]
    engine = PlayedEngine(says_nothing, made=made)
    sandbox = DockerSandbox(image="an-image", client=engine)
    try:
        await sandbox.run("print(1)", limits=LIMITS)
    finally:
        engine.close()
    assert [container.removed for container in made] == [1, 0, 1]
    with contextlib.suppress(SandboxUnavailableError):  # this fake engine runs a single program
        await sandbox.run("print(1)", limits=LIMITS)
    assert [container.removed for container in made] == [1, 0, 1]
