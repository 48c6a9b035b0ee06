"""Everything that docs/operations.md names exists: tests and alerts."""

import re
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = ROOT / "deploy" / "observability" / "alerts" / "headrace.yml"


def test_every_test_that_it_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 20
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert not {name for name in named if f"def {name}(" not in sources}
    files = set(re.findall(r"`((?:tests|services|shared)/[\w/.]+)`", PAGE))
    assert not {file for file in files if not (ROOT / file).exists()}


def test_every_alert_has_a_heading_that_says_what_to_do() -> None:
    if not ALERTS.exists():
        pytest.skip("there are no alert rules")
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    headings = set(re.findall(r"^### (Headrace\w+)$", PAGE, re.MULTILINE))
    assert alerts == headings


def runbook(alert: str) -> str:
    return PAGE.partition(f"### {alert}\n")[2].partition("\n### ")[0]


def test_a_runbook_leads_to_a_new_run_where_a_setting_is_the_cause() -> None:
    before_the_first = PAGE.partition("## What each alert means\n")[2].partition("\n### ")[0]
    assert "headrace submit --from RUN --set" in before_the_first
    assert "headrace submit --from RUN --set" in runbook("HeadraceRankRestarting")
    assert "SIGKILL" in runbook("HeadraceNoProgress"), "a rank that hangs does not act on SIGTERM"


def test_a_lost_redis_leads_to_runs_that_continue() -> None:
    (older,) = (line for line in PAGE.splitlines() if "went back in time" in line)
    assert "headrace resume RUN" in older
    (wiped,) = (line for line in PAGE.splitlines() if line.startswith("| Redis wiped"))
    assert "#backup-and-restore" in wiped


def test_a_lost_node_is_in_the_table_of_failures_and_where_a_missing_trainer_leads() -> None:
    """Kubernetes does not replace pods of StatefulSets on it by itself."""
    taint = "node.kubernetes.io/out-of-service"
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and taint in line]
    assert len(rows) == 1
    assert f"kubectl taint nodes NODE {taint}=nodeshutdown:NoExecute" in runbook("HeadraceTrainerMissing")
