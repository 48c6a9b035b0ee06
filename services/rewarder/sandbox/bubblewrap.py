"""Runs Python programs in Linux namespaces with bubblewrap. Needs neither root nor a daemon, and costs about 20 ms.

    worker --> bwrap --> python3 (process 1 of its own pid namespace)

The program sees ``/usr`` and its Python, both read-only, and an empty scratch directory. It does not have a network and
cannot create namespaces. It dies with bwrap, and bwrap dies with the worker. A service that runs as root runs the
program as another user, because the kernel does not limit the number of root's processes.
"""

import os
import resource
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from services.rewarder.sandbox.bounded_process import run_bounded
from services.rewarder.sandbox.sandbox import SCRATCH, Finished, Limits, SandboxUnavailableError, with_limits

_FIRST_USER_ID, _NUM_USER_IDS = 61_000, 4_000
"""User ids without a name, one per worker. Kernels before Linux 5.14 count processes only by user."""
_SHARED_MEMORY_BYTES = 1 << 20
_SYSTEM_DIRECTORIES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


class BubblewrapSandbox:
    """Runs Python programs in isolation with bubblewrap.

    Args:
        bwrap: Path of bwrap; looked up in PATH if empty.
        python: Path of the Python that runs programs; found automatically if empty.
    """

    def __init__(self, *, bwrap: str = "", python: str = "") -> None:
        self._bwrap = bwrap
        self._python = python
        self._command: list[str] | None = None
        self._scratch_bytes = 0

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits) -> Finished:
        """Run a Python program in its own namespaces until it ends or reaches a limit.

        Raises:
            SandboxUnavailableError: bubblewrap or a usable Python was not found, or bubblewrap could not be started.
        """
        command = [*self._prefix(limits.scratch_bytes), "-I", "-c", with_limits(program, limits)]
        try:
            return await run_bounded(
                command, stdin=stdin, wall_s=limits.wall_s, output_bytes=limits.output_bytes, identity=_identity()
            )
        except OSError as error:
            raise SandboxUnavailableError(f"bubblewrap could not be started: {error}") from error

    def why_too_much(self, limits: Limits) -> str | None:
        """Return the reason if the limits allow more memory than this worker process may have, else None."""
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or limits.memory_bytes <= hard:
            return None
        return (
            f"has an option 'memory_mib' of {limits.memory_bytes >> 20}, which is more than the {hard >> 20} MiB of a "
            "reward worker: lower it, or raise HEADRACE_WORKER_MEMORY_MIB"
        )

    def _prefix(self, scratch_bytes: int) -> list[str]:
        if self._command is None or self._scratch_bytes != scratch_bytes:
            bwrap = self._bwrap or shutil.which("bwrap")
            if not bwrap or not Path(bwrap).is_file():
                raise SandboxUnavailableError(
                    "bubblewrap is not installed where the rewarder runs: install the package bubblewrap, name the "
                    "program with HEADRACE_BWRAP, or set HEADRACE_SANDBOX=docker"
                )
            # Resolve links: the sandbox contains the directory of the Python itself, not the directory of a link to it.
            python = str(Path(self._python).resolve()) if self._python else usable_python()
            self._command = _command(bwrap, python, scratch_bytes)
            self._scratch_bytes = scratch_bytes
        return self._command


def _command(bwrap: str, python: str, scratch_bytes: int) -> list[str]:
    return [
        bwrap,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--ro-bind", "/usr", "/usr"),
        *(part for directory in _SYSTEM_DIRECTORIES for part in _like_here(directory)),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *_python_directories(python),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"),
        *("--size", str(scratch_bytes), "--tmpfs", SCRATCH, "--chdir", SCRATCH, "--remount-ro", "/"),
        python,
    ]


def _like_here(directory: str) -> list[str]:
    """Return bwrap's options for a directory like ``/lib``, which is a link into /usr or a real directory here."""
    if Path(directory).is_symlink():
        return ["--symlink", str(Path(directory).readlink()), directory]
    return ["--ro-bind", directory, directory] if Path(directory).is_dir() else []


def _python_directories(python: str) -> list[str]:
    home = str(Path(python).resolve().parent.parent)
    return [] if home == "/usr" or home.startswith("/usr/") else ["--ro-bind", home, home]


def usable_python() -> str:
    """Return the path of a Python that can run programs in the sandbox.

    This is the Python of this process, outside its virtual environment, or the system's Python. If this process runs as
    root, other users must be able to reach the files of that Python.

    Raises:
        SandboxUnavailableError: No such Python was found.
    """
    own = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    candidates = [own, Path(sys.executable).resolve(), Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    for candidate in candidates:
        if candidate.is_file() and (os.geteuid() != 0 or _is_reachable_by_all(candidate.resolve())):
            return str(candidate.resolve())
    raise SandboxUnavailableError(
        f"found no Python for programs in the sandbox: as root the rewarder runs programs as another user, which "
        f"cannot reach {candidates[1]}. Install python3, or name one with HEADRACE_SANDBOX_PYTHON"
    )


def _is_reachable_by_all(path: Path) -> bool:
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def _identity() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    number = _FIRST_USER_ID + os.getpid() % _NUM_USER_IDS
    return {"user": number, "group": number, "extra_groups": []}
