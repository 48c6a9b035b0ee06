"""The chart's objects for Prometheus, Grafana and autoscalers."""

import importlib.util
import json
import re
from typing import Any

import pytest
import yaml

from services.sessions.session_metrics import SessionMetrics
from services.sessions.settings import SessionsSettings
from tests.helm.chart import CHART, NAMESPACE, VALUES_FILES, Object, of_kind, render, values_of, why_refused
from tests.observability.conftest import ROOT, loaded


@pytest.fixture(scope="module")
def everything() -> list[Object]:
    return render(values_of("everything"))


def test_the_files_of_the_chart_equal_the_files_in_the_folders_beside_it() -> None:
    source = CHART.parent / "copy_files.py"
    spec = importlib.util.spec_from_file_location("copy_files", source)
    assert spec is not None
    assert spec.loader is not None
    copy_files: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy_files)
    wanted, copies = copy_files.wanted(), copy_files.copies()
    assert len(wanted) >= 7
    differing = sorted(path.name for path in wanted.keys() | copies.keys() if wanted.get(path) != copies.get(path))
    assert not differing, f"run python deploy/helm/copy_files.py: {differing}"


def test_every_scraped_service_has_the_job_name_that_alerts_know(everything: list[Object]) -> None:
    (monitor,) = of_kind(everything, "ServiceMonitor").values()
    label = monitor["spec"]["jobLabel"]
    assert monitor["spec"]["selector"]["matchExpressions"] == [{"key": label, "operator": "Exists"}]
    scraped = {
        name: it["metadata"]["labels"][label]
        for name, it in of_kind(everything, "Service").items()
        if label in it["metadata"]["labels"]
        and monitor["spec"]["selector"]["matchLabels"].items() <= it["metadata"]["labels"].items()
    }
    assert scraped == {
        "trainer-nodes": "headrace-trainer", "generators": "headrace-generator", "rewarder": "headrace-rewarder",
        "sessions": "headrace-sessions",
    }  # fmt: skip
    prometheus = yaml.safe_load((CHART.parent.parent / "observability" / "prometheus.yml").read_text())
    assert set(scraped.values()) <= {job["job_name"] for job in prometheus["scrape_configs"]}
    for name in scraped:
        ports = [port["name"] for port in of_kind(everything, "Service")[name]["spec"]["ports"]]
        assert monitor["spec"]["endpoints"][0]["port"] in ports
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}


def test_a_label_of_ours_that_the_operator_takes_gets_its_value_back(everything: list[Object]) -> None:
    page = loaded(ROOT / "docs" / "make_watching_page.py")
    ours = {label for found in page.registries().values() for metric in page.served(found) for label in metric.labels}
    taken = ours & {"namespace", "service", "pod", "container", "endpoint", "job", "instance", "node"}
    (monitor,) = of_kind(everything, "ServiceMonitor").values()
    (scraped,) = monitor["spec"]["endpoints"]
    *given_back, dropped = scraped["metricRelabelings"]
    expected = [{"sourceLabels": [f"exported_{label}"], "regex": "(.+)", "targetLabel": label} for label in taken]
    assert (given_back, dropped) == (expected, {"regex": "exported_endpoint", "action": "labeldrop"})


def test_alert_rules_are_the_files_word_for_word(everything: list[Object]) -> None:
    rules = of_kind(everything, "PrometheusRule")
    sources = sorted((CHART / "files" / "observability" / "alerts").glob("*.yml"))
    assert sources
    for source in sources:
        assert rules[f"alerts-{source.stem}"]["spec"] == yaml.safe_load(source.read_text())


def test_dashboards_are_the_files_word_for_word_with_the_label_that_grafana_looks_for(everything: list[Object]) -> None:
    maps = of_kind(everything, "ConfigMap")
    sources = sorted((CHART / "files" / "observability" / "dashboards").glob("*.json"))
    assert sources
    for source in sources:
        shown = maps[f"dashboard-{source.stem}"]
        assert json.loads(shown["data"][source.name]) == json.loads(source.read_text())
        assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_nothing_of_an_operator_is_made_where_it_is_not_asked_for() -> None:
    kinds = {it["kind"] for it in render()}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HorizontalPodAutoscaler", "Ingress"}


BUILT_IN = re.compile(r"v1|(apps|batch|policy|autoscaling)/v\d|[\w.]+\.k8s\.io/v1")
SOFTWARE = {"monitoring.coreos.com": "Prometheus Operator", "keda.sh": "KEDA"}
"""What defines the API groups that a cluster does not have by itself."""
PAGE = (CHART.parent.parent.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def added_groups(values_file: str) -> set[str]:
    versions = {it["apiVersion"] for it in render(values_of(values_file))}
    return {version.partition("/")[0] for version in versions if not BUILT_IN.fullmatch(version)}


def test_the_install_commands_of_the_docs_need_nothing_that_a_plain_cluster_lacks() -> None:
    """Helm refuses a whole release if the cluster does not know one of its kinds."""
    pages = (PAGE, (CHART / "README.md").read_text(encoding="utf-8"))
    used = [found for page in pages for found in re.findall(r"-f \S*?(values-[\w-]+\.yaml)", page)]
    of_the_chart = [name for name in used if not name.startswith("values-images-")]
    assert of_the_chart
    for name in of_the_chart:
        assert added_groups(name) == set(), name


@pytest.mark.parametrize("name", VALUES_FILES)
def test_what_else_a_values_file_needs_in_the_cluster_is_in_its_row_of_the_page(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    assert {group for group in SOFTWARE if SOFTWARE[group] in row} == added_groups(name)


DEPTH = (
    f'sum(headrace_run_stream_depth{{{{stream="{{}}",namespace="{NAMESPACE}"}}}}) or '
    f'0 * sum(headrace_rank_up{{{{namespace="{NAMESPACE}"}}}})'
)


@pytest.mark.parametrize(
    ("workload", "kind", "query"),
    [
        ("generator", "StatefulSet", DEPTH.format("prompts")),
        ("rewarder", "Deployment", DEPTH.format("completions")),
        ("sessions", "Deployment", f'sum(headrace_session_groups_in_flight{{namespace="{NAMESPACE}"}})'),
    ],
)
def test_keda_scales_on_groups_that_wait_or_are_worked_on(workload: str, kind: str, query: str) -> None:
    scaling = {"enabled": True, "kind": "keda", "minReplicas": 2, "maxReplicas": 9, "groupsPerReplica": 20}
    objects = render({workload: {"autoscaling": scaling}})
    spec = of_kind(objects, "ScaledObject")[workload]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": kind, "name": f"headrace-{workload}"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "prometheus"
    assert trigger["metadata"]["threshold"] == "20"
    assert trigger["metadata"]["query"] == query
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a scrape without the label does not mean an idle fleet"


def test_the_metrics_that_keda_asks_for_are_some_that_the_services_have() -> None:
    sessions = SessionMetrics().registry.get_sample_value("headrace_session_groups_in_flight")
    assert sessions == 0, "always present, and without labels"
    source = (CHART.parent.parent.parent / "services" / "trainer" / "run_api" / "run_metrics.py").read_text()
    assert '"headrace_run_stream_depth", "Groups waiting or being worked on", "run_id", "stream"' in source
    assert '"headrace_rank_up", "1 while a training rank runs")' in source, "always present, and without labels"


def test_more_groups_than_a_replica_plays_at_a_time_cannot_be_what_it_is_scaled_on() -> None:
    most = SessionsSettings().max_inflight_groups
    said = why_refused({"sessions": {"autoscaling": {"groupsPerReplica": most}}})
    assert "at '/sessions/autoscaling/groupsPerReplica': maximum" in said


def test_without_keda_rewarders_scale_on_processors_and_generators_on_an_external_metric() -> None:
    scaling = {"enabled": True, "kind": "hpa"}
    objects = render({name: {"autoscaling": scaling} for name in ("generator", "rewarder", "sessions")})
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    for name in ("rewarder", "sessions"):
        (cpu,) = scalers[name]["spec"]["metrics"]
        assert cpu["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    (depth,) = scalers["generator"]["spec"]["metrics"]
    assert depth["external"]["metric"]["name"] == "headrace_prompts_depth"
    # Each change of replicas needs a new communicator, and a new replica has to load the model first.
    assert scalers["generator"]["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 900


def test_the_rule_for_prometheus_adapter_answers_an_hpa_of_the_namespace() -> None:
    """An HPA asks for a metric of its namespace. Without the override, the adapter knows no label for that."""
    page = (CHART.parent.parent.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "seriesQuery" in block]
    (rule,) = yaml.safe_load(block)["rules"]["external"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert rule["name"]["as"] == values["generator"]["autoscaling"]["hpaMetricName"]
    assert rule["resources"] == {"overrides": {"namespace": {"resource": "namespace"}}}
    # Without a run there is no depth: the replicas would stay as they are, and the GPUs held.
    assert rule["seriesQuery"] == "headrace_rank_up"
    assert rule["metricsQuery"].endswith(" or 0 * sum(headrace_rank_up{<<.LabelMatchers>>})")


def test_the_ingress_leads_only_to_the_run_api(everything: list[Object]) -> None:
    (ingress,) = of_kind(everything, "Ingress").values()
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "rl.example.com"
    assert path["backend"]["service"] == {"name": "headrace-trainer", "port": {"number": 8000}}
    assert ingress["spec"]["tls"] == [{"secretName": "tls", "hosts": ["rl.example.com"]}]
