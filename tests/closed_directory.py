"""A directory that this process may not enter. Permissions would not keep root out, who runs some tests."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def close_directory(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let a look at anything below ``directory`` fail, as if it had mode 700 and another owner."""
    stat, access = os.stat, os.access

    def is_below(path: Any) -> bool:
        return not isinstance(path, int | bytes) and directory in Path(path).parents

    def refused_stat(path: Any, *args: Any, **options: Any) -> Any:
        if is_below(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    def refused_access(path: Any, *args: Any, **options: Any) -> bool:
        return path != directory and not is_below(path) and access(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused_stat)
    monkeypatch.setattr(os, "access", refused_access)
