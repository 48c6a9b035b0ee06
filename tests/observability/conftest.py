"""The files of deploy/observability, and promtool."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"


def loaded(path: Path) -> ModuleType:
    """Load a script that is not in a package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def promtool() -> str:
    """Return promtool's path; without it, skip and say what to do."""
    named = os.environ.get("PROMTOOL")
    found = named or shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.prefix) / "bin"))
    if found is None:
        pytest.skip(
            "ALERT RULES WERE NOT TESTED: promtool is missing. `make test` gets it where apt is installed; elsewhere "
            "take it from https://prometheus.io/download and put it on PATH, or name it in PROMTOOL"
        )
    return found
