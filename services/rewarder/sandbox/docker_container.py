"""Runs programs in Docker containers, through Docker's SDK, on hosts whose kernel forbids bubblewrap.

Each program has its own container, which costs a third of a second or more. The container does not have a network or
capabilities. Its root is read-only, and its memory and processes are limited. The worker removes it when the program
has ended or reached a limit. If the worker is killed before that, the engine removes the container when the program
ends. A container that was created but not started is removed by a worker that begins to use the engine later.
"""

import asyncio
import contextlib
import importlib
import socket
import struct
import threading
import time
from typing import Any, Literal

from services.rewarder.sandbox.sandbox import SCRATCH, Finished, Limits, SandboxUnavailableError, with_limits
from shared.install_commands import install_extras

_USER = 65534
_ENGINE_TIMEOUT_S = 30
_LABELS = {"headrace": "sandbox"}
_ABANDONED_S = 60.0
"""Age after which a created container counts as abandoned.

A container is started right after its creation, within the engine's timeout.
"""
_STDERR_BYTES = 8 << 10
_FRAME = struct.Struct(">BxxxI")
_STDOUT = 1


class DockerSandbox:
    """Runs Python programs in isolation, each in a new Docker container.

    Args:
        image: An image with ``python3``. It is not pulled, so it must exist already.
        client: The engine's client; if None, made from DOCKER_HOST and the other variables that Docker reads.
    """

    def __init__(self, *, image: str, client: Any = None) -> None:
        self._image = image
        self._client = client
        self._is_known = False

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits) -> Finished:
        """Run a Python program in a new container until it ends or reaches a limit. A thread waits for the engine.

        Raises:
            SandboxUnavailableError: The engine cannot be used, or failed while the program ran.
        """
        return await asyncio.to_thread(
            self._run, with_limits(program, limits, counts_own_processes=False), stdin, limits
        )

    def why_too_much(self, limits: Limits) -> str | None:
        """Return None: the limits of this worker process do not apply to the engine's containers."""
        return None

    def _run(self, program: str, stdin: bytes, limits: Limits) -> Finished:
        try:
            container = self._engine().containers.create(self._image, **container_options(program, limits))
        except SandboxUnavailableError:
            raise
        except Exception as error:
            raise SandboxUnavailableError(
                f"the Docker engine did not create a container of {self._image}: {_line(error)}. Pull the image, or "
                "name another with HEADRACE_SANDBOX_IMAGE"
            ) from error
        try:
            return _converse(container, stdin, limits)
        except Exception as error:
            raise SandboxUnavailableError(f"the Docker engine failed to run a container: {_line(error)}") from error
        finally:
            with contextlib.suppress(Exception):  # the engine may have removed it already (auto_remove)
                container.remove(force=True)

    def _engine(self) -> Any:
        if self._client is None:
            try:
                docker: Any = importlib.import_module("docker")
            except ImportError as error:
                raise SandboxUnavailableError(
                    "HEADRACE_SANDBOX=docker needs the package docker; install it with "
                    + install_extras("rewarder-docker")
                ) from error
            try:
                self._client = docker.from_env(timeout=_ENGINE_TIMEOUT_S)
                self._client.ping()
            except Exception as error:
                self._client = None
                raise SandboxUnavailableError(
                    f"no Docker engine answers: {_line(error)}. Set DOCKER_HOST, or HEADRACE_SANDBOX=bubblewrap"
                ) from error
        if not self._is_known:
            _refuse_tls(self._client)
            _remove_abandoned(self._client)
            self._is_known = True
        return self._client


def _refuse_tls(client: Any) -> None:
    if str(client.api.base_url).startswith("https:"):
        raise SandboxUnavailableError(
            f"the Docker engine at {client.api.base_url} is called over TLS, which cannot end a program's input: "
            "set DOCKER_HOST to a Unix socket or to TCP without TLS, or HEADRACE_SANDBOX=bubblewrap"
        )


def _remove_abandoned(client: Any) -> None:
    """Remove containers that were created over a minute ago and never started, because their worker was killed."""
    wanted = {"label": [f"{name}={value}" for name, value in _LABELS.items()], "status": "created"}
    with contextlib.suppress(Exception):  # another worker may do the same at the same time; a failure does no harm
        for container in client.containers.list(all=True, sparse=True, filters=wanted):
            if time.time() - container.attrs["Created"] > _ABANDONED_S:
                with contextlib.suppress(Exception):
                    container.remove(force=True)


def container_options(program: str, limits: Limits) -> dict[str, Any]:
    """Return the options with which the engine creates a container that runs ``program``."""
    return {
        "entrypoint": ["python3", "-I", "-c"],
        "command": [program],
        "environment": {},
        "use_config_proxy": False,  # a proxy's address may contain a password
        "user": f"{_USER}:{_USER}",
        "working_dir": SCRATCH,
        "network_mode": "none",
        "ipc_mode": "none",
        "read_only": True,
        # Set the owner, not only the mode: the mount takes the mode of the directory that the engine creates for it.
        "tmpfs": {SCRATCH: f"size={limits.scratch_bytes},uid={_USER},gid={_USER},mode=0700"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.processes,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "log_config": {"Type": "none"},
        "init": False,
        "stdin_open": True,
        "auto_remove": True,
        "labels": _LABELS,
    }


def _converse(container: Any, stdin: bytes, limits: Limits) -> Finished:
    attached: Any = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    channel: Any = getattr(attached, "_sock", attached)
    container.start()
    feeder = threading.Thread(target=_feed, args=(channel, stdin), name="docker stdin", daemon=True)
    feeder.start()
    deadline = time.monotonic() + limits.wall_s
    stdout, stderr = bytearray(), bytearray()
    ended: Literal["exited", "wall clock", "output"] = "exited"
    try:
        while (frame := _read_frame(channel, deadline)) is not None:
            stream, part = frame
            if stream == _STDOUT:
                stdout += part[: limits.output_bytes - len(stdout)]
                if len(stdout) == limits.output_bytes:
                    ended = "output"
                    break
            else:
                stderr += part[: _STDERR_BYTES - len(stderr)]
    except TimeoutError:
        ended = "wall clock"
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    # Closing only the SDK's object would leave its socket open, and a flood of output would then block the engine.
    attached.close()
    channel.close()
    return Finished(ended, None, bytes(stdout), bytes(stderr))


def _feed(channel: Any, content: bytes) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(content)
        channel.shutdown(socket.SHUT_WR)


def _read_frame(channel: Any, deadline: float) -> tuple[int, bytes] | None:
    """Return the stream number and content of the engine's next frame, or None at the end."""
    header = _read_exactly(channel, _FRAME.size, deadline)
    if header is None:
        return None
    stream, num_bytes = _FRAME.unpack(header)
    content = _read_exactly(channel, num_bytes, deadline)
    return None if content is None else (stream, content)


def _read_exactly(channel: Any, num_bytes: int, deadline: float) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        channel.settimeout(left_s)
        part = channel.recv(min(1 << 16, num_bytes - len(received)))
        if not part:
            return None
        received += part
    return bytes(received)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
