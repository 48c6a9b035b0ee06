"""Hides a service's keys and Redis URL from its child processes and from other processes of the same user.

    settings read --hide_secrets--> no child inherits secrets: reward workers, vLLM's workers, compilers, trackers
    a child that needs a secret --in_memory--> reads it from a file that exists only in its parent's memory
                                --handed_on--> inherits that file open, and closes it when its settings are read
    other processes of the user --close_to_others, give_up_tracing--> cannot read our memory

A process without secrets cannot leak them: a report, log or dump of its environment shows none.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import struct
import sys
from collections.abc import Collection, Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

_OWN: Final = "/proc/self/fd/"
_FIRST_DESCRIPTOR: Final = 64
"""Higher than the descriptors at which guarded_exec.py puts sockets."""
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 4, 24
_CAP_SYS_PTRACE, _CAPABILITY_VERSION_3 = 19, 0x20080522
_ENV_START, _ENV_END = 47, 48
"""Positions of fields in /proc/self/stat, counted after the command."""

SECRETS: Final[tuple[str, ...]] = (
    "HEADRACE_API_KEY",
    "HEADRACE_API_KEY_FILE",
    "HEADRACE_API_KEYS_FILE",
    "HEADRACE_INTERNAL_KEY",
    "HEADRACE_INTERNAL_KEY_FILE",
    "HEADRACE_REDIS_URL",
    "HEADRACE_REDIS_PASSWORD_FILE",
)
"""Variables that contain secrets, or name files that do."""


def hide_secrets(environment: MutableMapping[str, str]) -> None:
    """Remove the secrets from this process's environment and close inherited secret files, once settings are read."""
    hidden = [environment.pop(name, "") for name in SECRETS]
    for path in hidden:
        if is_handed_on(path):
            with contextlib.suppress(OSError, ValueError):
                os.close(int(path.rpartition("/")[2]))
    if environment is os.environ and sys.platform == "linux":
        _wipe(SECRETS)


@contextlib.contextmanager
def handed_on(secrets: Mapping[str, str]) -> Generator[tuple[dict[str, str], list[int]]]:
    """Yield variables through which a child finds these secrets, and the descriptors that it must inherit.

    Args:
        secrets: Secrets, by the variable that names a file with one, such as HEADRACE_API_KEY_FILE.
    """
    with contextlib.ExitStack() as opened:
        descriptors: dict[str, int] = {}
        for name, secret in secrets.items():
            file = os.fdopen(os.memfd_create("headrace-secret", os.MFD_CLOEXEC), "wb", buffering=0)
            with file:
                file.write(secret.encode())
                descriptors[name] = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
            opened.callback(os.close, descriptors[name])
        yield {name: f"{_OWN}{number}" for name, number in descriptors.items()}, list(descriptors.values())


def is_handed_on(path: str) -> bool:
    """Return whether a path names a file that this process inherited open. Such a path works in no other process."""
    return path.startswith(_OWN)


def close_to_others() -> None:
    """Keep other processes of the same user from attaching to this one, and from reading its memory and /proc files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def give_up_tracing() -> None:
    """Drop CAP_SYS_PTRACE, by which root reads other processes, in this process and all that it starts."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0)
    header = struct.pack("II", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        return
    sets = list(struct.unpack("6I", data.raw))
    for index in range(3):  # effective, permitted and inheritable; the first 32 capabilities of each
        sets[index] &= ~(1 << _CAP_SYS_PTRACE)
    libc.capset(header, struct.pack("6I", *sets))


@functools.cache
def in_memory(secret: str) -> str:
    """Return the path of a file in memory with the secret. Our child processes can read it until we end."""
    descriptor = os.memfd_create("headrace-secret", os.MFD_CLOEXEC)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _wipe(names: Collection[str]) -> None:
    """Overwrite variables in the memory that /proc/PID/environ shows. They must already be unset in ``os.environ``."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return
    at, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not at < end:
        return
    for entry in ctypes.string_at(at, end - at).split(b"\0"):
        if entry.partition(b"=")[0].decode(errors="replace") in names:
            ctypes.memset(at, 0, len(entry))
        at += len(entry) + 1
