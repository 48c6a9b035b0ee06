"""Reads the names, dtypes and shapes of tensors in safetensors files, without torch and without reading the tensors."""

import json
import struct
from pathlib import Path
from typing import Any, cast

_MAX_HEADER_BYTES = 64 * 1024 * 1024


def tensor_headers(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the properties of the tensors in a directory's files, by name. Files that are not valid are left out."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: about for file in files for name, about in _header(file).items() if name != "__metadata__"}


def _header(file: Path) -> dict[str, dict[str, Any]]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            found: Any = json.loads(opened.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError, struct.error):
        return {}
    return cast("dict[str, dict[str, Any]]", found) if isinstance(found, dict) else {}
