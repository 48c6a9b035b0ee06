"""Fixtures for the launcher's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.headrace.launcher_rig import LauncherRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LauncherRig]:
    """Return a rig, and end everything that it started."""
    rig = LauncherRig(tmp_path)
    yield rig
    rig.end()
