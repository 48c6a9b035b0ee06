"""Three sets of weights: the policy when a batch begins, a policy after several steps, and a reference."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.conftest import CONFORMANCE
from tests.tiny_model import make_tiny_model


@dataclass(frozen=True)
class Models:
    """Directories of three models with the same architecture."""

    start: Path
    moved: Path
    """Importance ratios to `start` are often outside a clip range of 0.2."""
    reference: Path


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that records a sentence to print at the end of the session."""
    return partial(record_property, CONFORMANCE)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return three models. Do not change their files."""
    root = tmp_path_factory.mktemp("conformance")
    start = make_tiny_model(root / "start", seed=1)
    return Models(
        start=start,
        moved=_perturbed(start, root / "moved", scale=0.012, seed=2),
        reference=_perturbed(start, root / "reference", scale=0.008, seed=3),
    )


def _perturbed(model: Path, directory: Path, *, scale: float, seed: int) -> Path:
    """Write a copy of the model with noise on every weight, and return its directory."""
    make_tiny_model(directory)
    files: Any = safetensors.torch
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in files.load_file(model / "model.safetensors").items()
    }
    files.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
