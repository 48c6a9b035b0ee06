"""What the tests of the launcher start with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.headrace.launcher_rig import LauncherRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LauncherRig]:
    """Return a rig; whatever it started is gone afterwards."""
    rig = LauncherRig(tmp_path)
    yield rig
    rig.end()
