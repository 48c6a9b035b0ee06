"""A separate disk for the state directory, which can be made full: a tmpfs in a mount namespace, without root.

`enter` restarts this program inside `unshare`. There, `StateDisk` mounts the disk, which vanishes with the last
process. The disk is made full by shrinking the file system to its content, so filling it takes no memory.
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
    """Restart this program in a mount namespace, unless it already runs in one.

    Returns:
        Whether the program runs in a namespace; False if the kernel does not allow this user to create one.
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
    """The disk at ``path``; ``is_own`` tells whether it can be made full."""

    def __init__(self, path: Path, *, is_own: bool) -> None:
        self.path = path
        self.is_own = is_own
        path.mkdir(parents=True, exist_ok=True)
        if is_own:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(path)], check=True)

    def fill(self) -> None:
        """Leave no free space: the next new page fails with ENOSPC."""
        for _ in range(_TRIES):
            disk = os.statvfs(self.path)
            used_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            if self._resize(str(used_bytes)):
                return
        raise RuntimeError(f"{self.path} grew faster than it could be filled")

    def free(self) -> None:
        """Restore the free space."""
        self._resize(_SIZE)

    def close(self) -> None:
        """Unmount the disk."""
        if self.is_own:
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)

    def _resize(self, size: str) -> bool:
        command = ["mount", "-o", f"remount,size={size}", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
