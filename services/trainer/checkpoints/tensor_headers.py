"""Reads the names, dtypes and shapes of tensors in safetensors files, without torch and without reading the tensors."""

import json
import struct
from pathlib import Path
from typing import Any, cast

from shared.files.file_roots import open_regular

_MAX_HEADER_BYTES = 64 * 1024 * 1024
_METADATA = "__metadata__"
_NO_LAYERS = ("embed_tokens", "lm_head", "embed_out", "wte", "wpe")

Header = dict[str, dict[str, Any]]
"""Properties by the name of the tensor."""


def tensor_headers(directory: Path) -> Header:
    """Return dtype, shape and offsets by tensor name, from the valid safetensors files in a directory."""
    return {name: about for file in _files(directory) for name, about in _header(file)[0].items() if name != _METADATA}


def linear_layers(directory: Path) -> set[str]:
    """Return the names of layers with a weight matrix that get adapters: no embeddings, output head or experts."""
    layers = {
        name.removesuffix(".weight")
        for name, about in tensor_headers(directory).items()
        if name.endswith(".weight") and len(about.get("shape", ())) == 2
    }
    return {name for name in layers if ".experts." not in name and name.rpartition(".")[2] not in _NO_LAYERS}


def damaged_tensor_file(directory: Path) -> Path | None:
    """Return the first file whose header is unreadable, names no tensor, or contradicts the file's size; else None."""
    for file in _files(directory):
        header, begin = _header(file)
        try:
            ends = [int(about["data_offsets"][1]) for name, about in header.items() if name != _METADATA]
            is_whole = bool(ends) and begin + max(ends) == file.stat().st_size
        except (LookupError, OSError, OverflowError, TypeError, ValueError):
            is_whole = False
        if not is_whole:
            return file
    return None


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _header(file: Path) -> tuple[Header, int]:
    """Return the header and the position of the first tensor; an empty header if the file is not valid."""
    try:
        with open_regular(file) as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            found: Any = json.loads(opened.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError, struct.error):
        return {}, 0
    if not isinstance(found, dict):
        return {}, 0
    tensors = cast("dict[str, object]", found)
    return {name: cast("dict[str, Any]", about) for name, about in tensors.items() if isinstance(about, dict)}, 8 + size
