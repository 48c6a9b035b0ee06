"""Decides which local files a run or a request may name: only files below the roots that the operator names.

    path --absolute, no "..", spelled below a root?--> links followed --still below a root?--> may be used

A path that is spelled outside the roots is refused without a look at the file system, so a refusal does not reveal what
exists. Without a setting, the roots are the top-level directories of this machine except the operating system's (/etc,
/proc, /run, /var and the like), and the user's home, working and temporary directories: the user who starts the
services on a laptop also submits the runs, and names their own files.
"""

import errno
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from shared.errors import UserError

_SYSTEM = frozenset(
    {
        *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "lost+found", "proc", "root", "run", "sbin"),
        *("snap", "sys", "usr", "var"),
    }
)
_STORES = ("s3://", "gs://", "gcs://", "az://", "abfs://")
_MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class FileRoots:
    """Directories and URL prefixes that may be named, and the setting that lists them.

    Attributes:
        roots: The directories and URL prefixes.
        variable: The setting that names the roots.
        is_default: Whether the setting is empty. Callers are not shown the default roots.
        except_for: Directories below a root that may not be used.
    """

    roots: tuple[str, ...]
    variable: str
    is_default: bool = False
    except_for: tuple[str, ...] = ()

    def require(self, path: str, *, field: str, whole: bool = False) -> None:
        """Raise UserError unless a path or URL may be used. With ``whole``, everything below it must be allowed too.

        Raises:
            UserError: It may not be used. Outside the roots the message is the same whether or not the path exists.
        """
        shown = path[:200]
        if "\0" in path or ".." in path.split("/"):
            raise UserError(f"{shown!r} has '..' in it; write the path without it", field=field)
        if "://" in path and not path.startswith("file://"):
            allowed = any(_is_below(path, root) for root in self.roots if "://" in root)
            if not allowed:
                raise UserError(self._outside(shown), field=field)
            return
        spelled = os.path.normpath(path.removeprefix("file://"))
        allowed = any(_is_below(spelled, root) for root in (*self.directories(), *self._resolved()))
        if not allowed or any(_is_below(spelled, closed) for closed in self._closed()):
            raise UserError(self._outside(shown), field=field)
        if not self._holds(os.path.realpath(spelled)):
            raise UserError(self._leads_out(shown), field=field)
        if whole and (reason := self._why_not_all_below(spelled)):
            raise UserError(f"{shown!r} {reason}; {self._named()}", field=field)

    def open(self, path: str, *, field: str) -> BinaryIO:
        """Open a file for reading, if it may be used.

        The real location of the open file is checked, so the file cannot be replaced between the check and the reading.

        Raises:
            UserError: The file may not be used, or is not a regular file.
            OSError: The file cannot be opened.
        """
        self.require(path, field=field)
        file = open(path.removeprefix("file://"), "rb", opener=_open_at_once)  # noqa: SIM115  the caller's
        at = f"/proc/self/fd/{file.fileno()}"
        real = os.readlink(at) if os.path.islink(at) else os.path.realpath(path)
        if not self._holds(real):
            file.close()
            raise UserError(self._leads_out(path[:200]), field=field)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise UserError(f"{path[:200]} is not a file", field=field)
        return file

    def directories(self) -> tuple[str, ...]:
        """Return the roots that are directories, without the URLs."""
        return tuple(root for root in self.roots if "://" not in root)

    def _resolved(self) -> tuple[str, ...]:
        return tuple(map(os.path.realpath, self.directories()))

    def _closed(self) -> tuple[str, ...]:
        return (*self.except_for, *map(os.path.realpath, self.except_for))

    def _holds(self, real: str) -> bool:
        is_inside = any(_is_below(real, root) for root in self._resolved())
        return is_inside and not any(_is_below(real, closed) for closed in self._closed())

    def _why_not_all_below(self, directory: str) -> str:
        """Return why not all files below a directory may be used, or "": a link leads out, or there are too many."""
        num_entries = 0
        waiting = [os.path.realpath(directory)]
        seen = set(waiting)
        while waiting:
            for top, directories, files in os.walk(waiting.pop()):
                num_entries += len(directories) + len(files)
                if num_entries > _MAX_ENTRIES:
                    return f"has more than {_MAX_ENTRIES:,} files below it: more than a model or a data set has"
                for name in (*directories, *files):
                    path = os.path.join(top, name)
                    if not os.path.islink(path):
                        continue
                    real = os.path.realpath(path)
                    if not self._holds(real):
                        return f"has a link that leads out of the directories that runs may name: {path[-200:]!r}"
                    if real not in seen and os.path.isdir(real):
                        seen.add(real)
                        waiting.append(real)
        return ""

    def _outside(self, shown: str) -> str:
        return f"{shown!r} is not in a place that runs may name; {self._named()}"

    def _leads_out(self, shown: str) -> str:
        return f"{shown!r} leads through a link out of the directories that runs may name; {self._named()}"

    def _named(self) -> str:
        if self.is_default:
            return (
                f"{self.variable} of this service is empty: runs may name files in the directories of its user, never "
                "in the operating system's"
            )
        return f"{self.variable} of this service names {', '.join(dict.fromkeys(self.roots))}"


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. A pipe is refused, because opening it waits for its other end.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def why_unreadable(error: OSError) -> str:
    """Return a sentence about a file or directory that cannot be read: which one, why, and what to do."""
    says = f"{str(error.filename or 'a file')[:200]} cannot be read: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return f"{says}. Let user {os.getuid()} read it and enter the directories above it, or name another one"
    return f"{says}; name another one"


def parse_roots(text: str) -> tuple[str, ...]:
    """Return the roots in a text, separated by colons as in PATH. A root may be a URL such as s3://bucket/prefix.

    Raises:
        ValueError: A root is neither an absolute path nor a URL.
    """
    roots = tuple(root.rstrip("/") if "://" not in root else root for root in re.split(r":(?!//)", text) if root)
    for root in roots:
        if "://" not in root and not root.startswith("/"):
            raise ValueError(f"'{root}' is neither an absolute path nor a URL such as s3://bucket/weights")
    return roots


@cache
def default_roots() -> tuple[str, ...]:
    """Return the machine's top-level directories except the system's, plus the home, current and temporary ones."""
    found = {f"/{name}" for name in os.listdir("/") if name not in _SYSTEM and Path("/", name).is_dir()}
    found |= {os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir()}
    return tuple(sorted(path for path in found if path.startswith("/") and path != "/"))


def default_weight_roots() -> tuple[str, ...]:
    """Return the default roots plus every object store: the service's credentials limit the buckets."""
    return (*default_roots(), *_STORES)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # does not wait for the other end of a pipe


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith("/") else f"{root}/")
