"""The limits of a worker process, which it sets for itself before it runs user code."""

import errno
import math
import os
import resource

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
    """Return whether an exception, or its cause, says that the memory is used up."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (ImportError, RuntimeError)) and any(text in message_of(error) for text in _NO_MEMORY):
        return True
    return is_out_of_memory(error.__cause__)


def limit_cpu(timeout_s: float) -> None:
    """Limit the processor time of the next import or call, in case the service is gone and cannot end it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    budget_s = timeout_s * (os.cpu_count() or 1) + _SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + budget_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
