"""Alert rules are valid, fire for the problems they are made for, and stay silent for similar harmless states."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.conftest import OBSERVABILITY

RULES = OBSERVABILITY / "alerts" / "headrace.yml"
SERIES = Path(__file__).with_name("alerts_test.yml")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_prometheus_configuration_is_valid_and_finds_its_rules(promtool: str) -> None:
    checked(promtool, "check", "config", str(OBSERVABILITY / "prometheus.yml"))


def test_the_rules_are_valid(promtool: str) -> None:
    checked(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_alerts_fire_on_what_they_are_there_for_and_not_on_near_misses(promtool: str) -> None:
    checked(promtool, "test", "rules", str(SERIES))


def test_every_alert_is_tested_for_firing_and_for_silence() -> None:
    """Its near miss is a series of a metric in its expression, with a label that begins with ``ok``."""
    expressions = {alert["alert"]: alert["expr"] for alert in alerts()}
    fired: set[str] = set()
    silent_on_a_near_miss: set[str] = set()
    for test in yaml.safe_load(SERIES.read_text())["tests"]:
        near = {series["series"].split("{")[0] for series in test["input_series"] if '="ok' in series["series"]}
        for expectation in test["promql_expr_test"]:
            (pattern,) = re.findall(r'alertname=~?"([^"]+)"', expectation["expr"]) or ["-"]
            named = {name for name in expressions if re.fullmatch(pattern, name)}
            fires = {
                name
                for sample in expectation["exp_samples"]
                for name in re.findall(r'alertname="(\w+)"', sample["labels"])
            }
            assert fires <= named, f"{fires - named}: no such alert"
            fired |= fires
            silent_on_a_near_miss |= {name for name in named if near & set(re.findall(r"\w+", expressions[name]))}
    assert fired == expressions.keys()
    assert silent_on_a_near_miss == expressions.keys()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_is_wrong_how_bad_it_is_and_where_to_read_on(alert: dict[str, Any]) -> None:
    name, says = alert["alert"], alert["annotations"]
    assert re.fullmatch(r"Headrace[A-Z]\w+", name)
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert says.keys() == {"summary", "description", "runbook"}
    assert says["runbook"] == f"docs/operations.md#{name.lower()}"
    # A label that the expression has aggregated away would be empty in the sentence.
    grouped_by = re.search(r"by \(([^)]*)\)", alert["expr"])
    kept = grouped_by[1].split(", ") if grouped_by else list[str]()
    assert set(re.findall(r"\$labels\.(\w+)", " ".join(says.values()))) <= set(kept)
