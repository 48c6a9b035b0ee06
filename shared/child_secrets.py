"""Keeps the keys and the address of Redis out of the environments of child processes.

    settings read --hide_secrets--> no child inherits them: reward workers, vLLM's workers, compilers, trackers
    a child of ours that needs one --in_memory--> reads it from a file that lies nowhere but in its parent

A process that needs no secret cannot leak one: whatever reports, logs or dumps its environment shows none.
"""

import logging
import os
import threading
from collections.abc import MutableMapping
from typing import Final

SECRETS: Final[tuple[str, ...]] = (
    "HEADRACE_API_KEY",
    "HEADRACE_API_KEY_FILE",
    "HEADRACE_API_KEYS_FILE",
    "HEADRACE_INTERNAL_KEY",
    "HEADRACE_INTERNAL_KEY_FILE",
    "HEADRACE_REDIS_URL",
    "HEADRACE_REDIS_PASSWORD_FILE",
)
"""Variables that hold secrets, or say where they are."""

log = logging.getLogger(__name__)

_files: dict[str, int] = {}
_lock = threading.Lock()


def hide_secrets(environment: MutableMapping[str, str]) -> None:
    """Take the secrets out of this process's environment, once its settings have been read from it."""
    for name in SECRETS:
        environment.pop(name, None)


def in_memory(secret: str) -> str:
    """Return the path of a file in this process's memory, which its children may read as long as it lives."""
    with _lock:
        descriptor = _files.get(secret)
        if descriptor is not None and not _holds(descriptor, secret):
            log.error("descriptor %d, of a secret, was closed by something in this process; it has another", descriptor)
            descriptor = None
        if descriptor is None:
            descriptor = os.memfd_create("headrace-secret", os.MFD_CLOEXEC)
            os.write(descriptor, secret.encode())
            _files[secret] = descriptor
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _holds(descriptor: int, secret: str) -> bool:
    """Whether it is still ours: a library that closes a number twice closes somebody else's file."""
    data = secret.encode()
    try:
        return os.pread(descriptor, len(data) + 1, 0) == data
    except OSError:
        return False
