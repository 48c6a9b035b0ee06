"""A tiny model on disk, made once."""

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model. Do not change it."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
