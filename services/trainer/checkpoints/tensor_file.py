"""Writes tensors to a safetensors file, never a pickle. Translates safetensors' errors to OSError."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor], *, header: Mapping[str, str] | None = None) -> None:
    """Write named tensors to a safetensors file.

    Args:
        file: Replaced if it exists.
        tensors: Contiguous tensors that do not share memory.
        header: Metadata for the file's header.

    Raises:
        OSError: The file could not be written.
    """
    import safetensors.torch

    try:
        cast(Any, safetensors.torch).save_file(dict(tensors), file, None if header is None else dict(header))
    except safetensors.SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
