"""A file of tensors, safetensors; never a pickle. Foreign errors of writing end here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor], *, header: Mapping[str, str] | None = None) -> None:
    """Write tensors by name.

    Args:
        file: What is there already is replaced.
        tensors: Contiguous, and none of them a part of another's memory.
        header: What else readers are told.

    Raises:
        OSError: They could not be written.
    """
    import safetensors.torch

    try:
        cast(Any, safetensors.torch).save_file(dict(tensors), file, None if header is None else dict(header))
    except safetensors.SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
