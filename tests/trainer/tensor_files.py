"""Reads safetensors files for tests."""

from pathlib import Path
from typing import Any, cast

import safetensors.torch
from torch import Tensor


def load_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    return dict(cast(Any, safetensors.torch).load_file(path))
