"""A disk of its own for the state directory, that can be full: a tmpfs in a mount namespace, without root.

`enter` starts this program again inside `unshare`; there `mount` makes the disk, and it vanishes with the last process.
Full is a file system as large as what is on it, so filling it takes no memory.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_INSIDE = "CHAOS_NAMESPACE"
_SIZE = "1g"
_TRIES = 20


def enter(module: str, arguments: Sequence[str]) -> bool:
    """Start this program again in a mount namespace, unless it runs in one; return whether it does.

    Returns:
        False where the kernel does not let this user have one.
    """
    if _INSIDE in os.environ:
        return os.environ[_INSIDE] == "yes"
    namespace = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
    try:
        trial = [*namespace, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        allowed = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    os.environ[_INSIDE] = "yes" if allowed else "no"
    if allowed:
        os.execvp(namespace[0], [*namespace, sys.executable, "-m", module, *arguments])
    return False


class StateDisk:
    """The disk at ``path``; ``is_own`` says whether it can be full."""

    def __init__(self, path: Path, *, is_own: bool) -> None:
        self.path = path
        self.is_own = is_own
        path.mkdir(parents=True, exist_ok=True)
        if is_own:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(path)], check=True)

    def fill(self) -> None:
        """Leave no room: the next new page is an ENOSPC."""
        for _ in range(_TRIES):
            disk = os.statvfs(self.path)
            used_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            if self._resize(str(used_bytes)):
                return
        raise RuntimeError(f"{self.path} grew faster than it could be filled")

    def free(self) -> None:
        """Have room again."""
        self._resize(_SIZE)

    def close(self) -> None:
        """Take the disk away."""
        if self.is_own:
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)

    def _resize(self, size: str) -> bool:
        command = ["mount", "-o", f"remount,size={size}", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
