"""The rendered chart, scanned with checkov: no finding without a reason, and no reason without a finding."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.helm.chart import CHART, SERVICES, render, values_of

SCRIPT = CHART.parent / "policy_scan.py"
PRIVILEGED = "CKV_K8S_16"


@pytest.fixture(scope="module")
def checkov() -> str:
    """Return the checkov that the Makefile installs; without it, skip and say what to do."""
    found = Path(__file__).parents[2] / ".venv-policy" / "bin" / "checkov"
    if not found.exists():
        pytest.skip(
            "THE CHART WAS NOT SCANNED: checkov is not installed. `make test` and `make policy-scan` install it"
        )
    return str(found)


def policy_scan() -> ModuleType:
    """Return the script, which is not in a package, as a module."""
    spec = importlib.util.spec_from_file_location("policy_scan", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scan_of_every_values_file_finds_nothing_without_a_reason(checkov: str) -> None:
    scan = subprocess.run(
        [sys.executable, str(SCRIPT), checkov], capture_output=True, text=True, timeout=400, check=False
    )
    assert scan.returncode == 0, scan.stdout + scan.stderr
    assert "each with its reason" in scan.stdout


def test_the_scan_finds_a_container_that_was_made_privileged(
    checkov: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = render(values_of("everything"))
    for it in objects:
        if it["kind"] == "StatefulSet" and it["metadata"]["name"].endswith("-trainer"):
            it["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    (tmp_path / "everything.yaml").write_text(yaml.safe_dump_all(objects))
    script = policy_scan()
    found = script.findings(checkov, str(tmp_path))
    assert {workload for check, workload in found if check == PRIVILEGED} == {"trainer"} <= set(SERVICES)
    assert script.judge(found) == 1
    assert f"trainer: {PRIVILEGED}" in capsys.readouterr().out
