"""Keeps the keys and the address of Redis out of the environments of child processes.

    settings read --hide_secrets--> no child inherits them: reward workers, vLLM's workers, compilers, trackers
    a child of ours that needs one --in_memory--> reads it from a file that lies nowhere but in its parent

A process that needs no secret cannot leak one: whatever reports, logs or dumps its environment shows none.
"""

import functools
import os
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


def hide_secrets(environment: MutableMapping[str, str]) -> None:
    """Take the secrets out of this process's environment, once its settings have been read from it."""
    for name in SECRETS:
        environment.pop(name, None)


@functools.cache
def in_memory(secret: str) -> str:
    """Return the path of a file in this process's memory, which its children may read as long as it lives."""
    descriptor = os.memfd_create("headrace-secret", os.MFD_CLOEXEC)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
