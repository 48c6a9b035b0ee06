"""Gives each replica on a machine its own directory for vLLM's compiled graphs, and removes broken files from it.

    ~/.cache/vllm          <- the first replica        ~/.cache/vllm/replica-1   <- the second        ...

vLLM writes its index of compiled graphs in place. A replica that starts while another one writes would read half of it
and fail. A replica that was killed while it wrote would fail at every start. The kernel releases a claim when the
process ends, so a restarted replica finds a free directory with its compiled graphs.
"""

import ast
import fcntl
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

_VARIABLE = "VLLM_CACHE_ROOT"
_MAX_REPLICAS = 64
open_locks: list[int] = []
"""Descriptors that hold the claims; open as long as this process lives."""


def claim_compile_cache(environment: MutableMapping[str, str]) -> Path | None:
    """Have vLLM keep compiled graphs in a directory that no other replica uses; return it, or None on failure."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = Path(os.path.expanduser(environment.get(_VARIABLE) or os.path.join(home, "vllm")))
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
        environment[_VARIABLE] = str(directory)
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
