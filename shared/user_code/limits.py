"""The limits of a worker process, which it sets for itself before it runs user code."""

import math
import os
import resource

import msgspec

from shared.user_code.error_text import describe

_SPARE_CPU_S = 5


class Limits(msgspec.Struct, frozen=True):
    """The address space and the number of open files of one worker."""

    memory_bytes: int
    open_files: int

    def set(self) -> None:
        """Limit this process, for ever."""
        _limit(resource.RLIMIT_AS, self.memory_bytes)
        _limit(resource.RLIMIT_NOFILE, self.open_files)
        _limit(resource.RLIMIT_CORE, 0)

    def describe(self, error: BaseException) -> str:
        """Return the type and message of an exception in user code, and for a MemoryError also the limit."""
        if not isinstance(error, MemoryError):
            return describe(error)
        memory_mib = self.memory_bytes // 2**20
        return f"{describe(error)} (a worker has {memory_mib} MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"


def limit_cpu(timeout_s: float) -> None:
    """Limit the processor time of the next step, in case the service is gone and cannot enforce the deadline."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    budget_s = timeout_s * (os.cpu_count() or 1) + _SPARE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + budget_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
