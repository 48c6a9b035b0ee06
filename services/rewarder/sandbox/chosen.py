"""Holds the sandbox of this process, and tests whether it works.

The test runs a program in the sandbox, because an engine can be installed and answer and still run nothing. The result
is cached for five minutes, or for ten seconds if the sandbox does not work.
"""

import os
import secrets
import time
from typing import Literal

import msgspec

from services.rewarder.sandbox.bubblewrap import BubblewrapSandbox
from services.rewarder.sandbox.docker_container import DockerSandbox
from services.rewarder.sandbox.sandbox import Limits, Sandbox, SandboxUnavailableError

Kind = Literal["bubblewrap", "docker"]
DEFAULT_IMAGE = "python:3.12-slim"
_TRUST_S, _DISTRUST_S = 300.0, 10.0
_SELF_TEST_LIMITS = Limits(wall_s=10.0)
"""Shorter than the limit of a check (HEADRACE_CHECK_TIMEOUT_S), so that the check can still report the reason."""
_SELF_TEST = """
import os, sys
print(sys.stdin.read(), os.getpid(), sys.version_info >= (3, 10))
"""


class SandboxChoice(msgspec.Struct, frozen=True):
    """The operator's choice of the sandbox for generated code.

    ``bwrap`` and ``python`` are paths, found automatically if empty. ``image`` is for Docker only. ``num_workers`` is
    the number of worker processes that share the processors.
    """

    kind: Kind = "bubblewrap"
    bwrap: str = ""
    python: str = ""
    image: str = DEFAULT_IMAGE
    num_workers: int = 1


class _State:
    """The sandbox of this worker process, and the result of its last test.

    It is global because reward functions cannot be given extra arguments.
    """

    sandbox: Sandbox = BubblewrapSandbox()
    num_workers = 1
    why_unusable: str | None = None
    checked_until = 0.0


def choose(choice: SandboxChoice) -> None:
    """Set the sandbox of this process, to be tested before its next use."""
    if choice.kind == "docker":
        _State.sandbox = DockerSandbox(image=choice.image)
    else:
        _State.sandbox = BubblewrapSandbox(bwrap=choice.bwrap, python=choice.python)
    _State.num_workers = choice.num_workers
    _State.checked_until = 0.0


def num_at_once() -> int:
    """Return how many programs this process may run at a time, so that each program of all workers has a processor."""
    return max(1, len(os.sched_getaffinity(0)) // _State.num_workers)


async def usable_sandbox() -> Sandbox:
    """Return the sandbox of this process, after a successful test now or in the last five minutes.

    Raises:
        SandboxUnavailableError: The sandbox does not work. The message says how to get a working sandbox.
    """
    if time.monotonic() >= _State.checked_until:
        _State.why_unusable = await _why_unusable(_State.sandbox)
        _State.checked_until = time.monotonic() + (_TRUST_S if _State.why_unusable is None else _DISTRUST_S)
    if _State.why_unusable is not None:
        raise SandboxUnavailableError(_State.why_unusable)
    return _State.sandbox


async def _why_unusable(sandbox: Sandbox) -> str | None:
    word = secrets.token_hex(8)
    try:
        finished = await sandbox.run(_SELF_TEST, stdin=word.encode(), limits=_SELF_TEST_LIMITS)
    except SandboxUnavailableError as error:
        return str(error)
    said = finished.stdout.decode("utf-8", "replace").split()
    if said == [word, "1", "True"]:
        return None
    if said == [word, "1", "False"]:
        return "the Python of the sandbox is older than 3.10; name a newer one with HEADRACE_SANDBOX_PYTHON"
    complaint = " ".join(finished.stderr.decode("utf-8", "replace").split())[:200]
    how = complaint or f"exit code {finished.exit_code}, {finished.ended}"
    return (
        f"a program run in the sandbox to test it did not answer ({how}). Allow unprivileged user namespaces where the "
        "rewarder runs, or set HEADRACE_SANDBOX=docker; docs/built-in-rewards.md says what each needs"
    )
