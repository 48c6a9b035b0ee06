"""A subprocess imports our packages, and nothing of ours by a shorter name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.local.service_specs import importable_environment

pytestmark = pytest.mark.unit


def test_the_first_place_to_import_from_is_the_folder_that_holds_our_packages() -> None:
    root = Path(importable_environment()["PYTHONPATH"].split(os.pathsep)[0])
    assert [name for name in ("services", "shared", "headrace") if not (root / name / "__init__.py").is_file()] == []


def test_a_subprocess_imports_services_without_an_installation(tmp_path: Path) -> None:
    code = "import services, shared, headrace"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=importable_environment(), cwd=tmp_path)
