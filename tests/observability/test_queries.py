"""All metrics, labels and values in the queries of alerts and dashboards exist in the code."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import promql_parser
import pytest
import yaml

from services.rewarder.rewarder_metrics import HTTP_LANE
from services.trainer.run_api.run_metrics import DROPS_TO_WATCH
from services.trainer.run_api.run_view import Queues
from services.trainer.telemetry.metric_catalogue import EVALUATION, METRICS
from shared.messages import Outcome
from shared.pause import PausedBy
from tests.observability.conftest import OBSERVABILITY, ROOT, loaded

OF_A_SCRAPE = {"job", "instance", "namespace"}
NOT_OURS = {
    "up": set[str](),
    "ALERTS": {"alertname", "alertstate"},
    "DCGM_FI_DEV_GPU_UTIL": {"gpu", "Hostname"},
    "DCGM_FI_DEV_FB_USED": {"gpu", "Hostname"},
    "DCGM_FI_DEV_POWER_USAGE": {"gpu", "Hostname"},
}
VALUES = {
    ("headrace_runs", "status"): {"queued", "running", "paused", "finished", "stopped", "failed"},
    ("headrace_run_paused", "by"): set(get_args(PausedBy)),
    ("headrace_run_stream_depth", "stream"): set(Queues.model_fields),
    ("headrace_run_pushes", "outcome"): {"confirmed", "failed"},
    ("headrace_run_groups", "outcome"): {
        "admitted", "trained", "in_flight", *(f"dropped_{reason}" for reason in DROPS_TO_WATCH),
    },
    ("headrace_reward_outcomes_total", "outcome"): set(get_args(Outcome)),
    ("headrace_reward_groups_total", "end"): {"scored", "scored elsewhere", "buried"},
    ("headrace_session_rollouts_total", "end"): {"played", "lost"},
    ("headrace_session_tool_calls_total", "end"): {"answered", "failed"},
    ("headrace_reward_queue_depth", "queue"): {"workers", "limits", "requests"},
    ("headrace_reward_queue_depth", "lane"): {"run", HTTP_LANE},
}  # fmt: skip
"""Allowed values of labels. A label that is not listed may have any value."""


def known_metrics() -> dict[str, set[str]]:
    """Return the labels of every series that a service exports, by name."""
    page = loaded(ROOT / "docs" / "make_watching_page.py")
    known = {name: labels | OF_A_SCRAPE for name, labels in NOT_OURS.items()}
    for registry in page.registries().values():
        for metric in page.served(registry):
            labels = {*metric.labels, *OF_A_SCRAPE}
            if metric.kind == "histogram":
                known |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
                known[f"{metric.name}_bucket"] = labels | {"le"}
            else:
                known[metric.name] = labels
    for metric in METRICS:
        labels = {"run_id", *metric.label_names, *OF_A_SCRAPE}
        known[metric.prometheus_name] = labels
        if not metric.name.startswith(EVALUATION):
            known[metric.prometheus_name.replace("headrace_training_", f"headrace_training_{EVALUATION}")] = labels
    return known


KNOWN = known_metrics()


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield the place of each query, the query, and the text that is shown with its result."""
    for group in yaml.safe_load((OBSERVABILITY / "alerts" / "headrace.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], ""
    for path in sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]
        for annotation in dashboard["annotations"]["list"]:
            yield f"{path.stem}: {annotation['name']}", annotation["expr"], annotation["titleFormat"]
        for variable in dashboard["templating"]["list"]:
            if found := re.fullmatch(
                r"label_values\((.+), (\w+)\)",
                variable.get("query", {})["query"] if variable["type"] == "query" else "",
            ):
                yield f"{path.stem}: ${variable['name']}", found[1], f"{{{{{found[2]}}}}}"


ALL = list(queries())


def test_there_are_queries() -> None:
    assert len(ALL) > 100


@pytest.mark.parametrize(
    ("where", "query", "legend"), ALL, ids=[f"{where}-{number}" for number, (where, _, _) in enumerate(ALL)]
)
def test_a_query_names_only_what_the_code_has(where: str, query: str, legend: str) -> None:
    selectors: list[promql_parser.VectorSelector] = []
    grouped_by: list[str] = []

    def look(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped_by.extend(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(query), look)
    labels: set[str] = set()
    for selector in selectors:
        name = selector.name or ""
        assert name in KNOWN, f"{where}: no service has a metric {name!r}"
        labels |= KNOWN[name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in KNOWN[name], f"{where}: {name} has no label {matcher.name!r}"
            values = VALUES.get((name, matcher.name))
            if values is not None:
                assert any(re.fullmatch(matcher.value, value) for value in values), f"{where}: {matcher}"
    assert set(grouped_by) <= labels, f"{where}: grouped by a label that no metric in it has"
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (set(grouped_by) or labels), f"{where}: the legend {legend!r} would stay empty"


def test_a_query_with_an_unknown_metric_is_found() -> None:
    for query in ("max(headrace_run_stepp)", 'headrace_runs{state="queued"}', "sum by (runid) (headrace_run_step)"):
        with pytest.raises(AssertionError):
            test_a_query_names_only_what_the_code_has("here", query, "")


def test_every_metric_of_the_services_is_drawn_or_watched() -> None:
    """Finds series that no alert or dashboard uses: either they are not needed, or they were forgotten."""
    text = " ".join(query for _, query, _ in ALL)
    page: Any = loaded(ROOT / "docs" / "make_watching_page.py")
    named = [metric.name for registry in page.registries().values() for metric in page.served(registry)]
    assert [name for name in named if name not in text] == [
        "headrace_run_paused_seconds",  # for users who pay by the hour
        "headrace_groups_generated_twice_total",  # work that was repeated, which does no harm
    ]
