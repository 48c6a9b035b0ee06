"""The limits of a worker process, which it sets for itself before it runs user code."""

import errno
import os
import resource
import signal

import msgspec

from shared.user_code.error_text import describe, message_of

_SPARE_CPU_S = 5
_NO_MEMORY = "failed to map segment", "can't allocate memory"
"""Texts of an ImportError of the dynamic linker and of a RuntimeError of torch if the address space is used up."""


class Limits(msgspec.Struct, frozen=True):
    """Limits on the address space and the number of open files of one worker."""

    memory_bytes: int
    open_files: int

    def set(self) -> None:
        """Apply the limits to this process, each as soft and hard limit."""
        _limit(resource.RLIMIT_AS, self.memory_bytes)
        _limit(resource.RLIMIT_NOFILE, self.open_files)
        _limit(resource.RLIMIT_CORE, 0)

    def describe(self, error: BaseException) -> str:
        """Return the type and message of an exception in user code, and the memory limit if memory ran out."""
        return f"{describe(error)}{self.hint(error)}"

    def hint(self, error: BaseException) -> str:
        """Return the memory limit in parentheses if ``error`` means that memory ran out, otherwise an empty text."""
        memory_mib = self.memory_bytes // 2**20
        hint = f" (a worker has {memory_mib} MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"
        return hint if is_out_of_memory(error) else ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one that caused it, says that the memory is used up."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # `raise error from error` is its own cause
        seen.add(id(error))
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, (ImportError, RuntimeError)) and any(text in message_of(error) for text in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


def limit_cpu(timeout_s: float) -> None:
    """Limit the processor time, in user mode, of the next import or call, in case the service cannot end it.

    This is a timer and not RLIMIT_CPU, which processes that a function starts and keeps would inherit for good.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, timeout_s * (os.cpu_count() or 1) + _SPARE_CPU_S)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
