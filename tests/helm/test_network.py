"""Allowed connections by the chart's NetworkPolicies. Only a cluster can show that a network plugin enforces them."""

import pytest

from tests.helm.chart import NAMESPACE, SERVICES, Object, of_kind, render, values_of, workloads
from tests.helm.policies import Place, allowed, place

STRANGER = Place(labels={"app": "stranger"})
ELSEWHERE = Place(labels={"app": "stranger"}, namespace="another")
PROMETHEUS = Place(labels={"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
DNS = Place(labels={"k8s-app": "kube-dns"}, namespace="kube-system")
INTERNET = Place(address="93.184.216.34")
METADATA_SERVICE = Place(address="169.254.169.254")
INSIDE = Place(address="10.0.0.7")
HTTP, METRICS, REDIS, NCCL, RENDEZVOUS = 8000, 9090, 6379, 40123, 29500


@pytest.fixture(scope="module")
def several() -> list[Object]:
    return render(values_of("everything"))


@pytest.fixture(scope="module")
def one() -> list[Object]:
    return render()


def test_every_workload_has_a_policy_and_all_are_denied_by_default(several: list[Object]) -> None:
    policies = of_kind(several, "NetworkPolicy")
    assert policies.keys() == {"default-deny", "dns", *workloads(several)}
    deny = policies["default-deny"]["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not deny.get("ingress")
    assert not deny.get("egress")
    for workload in workloads(several):
        assert deny["podSelector"]["matchLabels"].items() <= (place(several, workload).labels or {}).items()


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("trainer", "generator", HTTP),
        ("trainer", "generator", NCCL),
        ("generator", "trainer", NCCL),
        ("generator", "generator", NCCL),
        ("trainer", "trainer-node", NCCL),
        ("trainer-node", "trainer", RENDEZVOUS),
        ("trainer-node", "trainer", HTTP),
        ("trainer-node", "trainer-node", NCCL),
        ("trainer", "rewarder", HTTP),
        ("trainer", "redis", REDIS),
        ("generator", "redis", REDIS),
        ("rewarder", "redis", REDIS),
        ("sessions", "redis", REDIS),
        ("sessions", "generator", HTTP),
        ("trainer", "sessions", HTTP),
        ("test", "trainer", HTTP),
    ],
)
def test_the_connections_that_services_need_are_allowed(
    source: str, target: str, port: int, several: list[Object]
) -> None:
    assert allowed(several, place(several, source), place(several, target), port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("rewarder", "generator", HTTP),
        ("rewarder", "trainer", NCCL),
        ("rewarder", "generator", NCCL),
        ("generator", "generator", HTTP),
        ("generator", "rewarder", HTTP),
        ("trainer-node", "generator", HTTP),
        ("trainer-node", "redis", REDIS),
        ("test", "redis", REDIS),
        ("test", "generator", HTTP),
        ("redis", "trainer", HTTP),
        ("rewarder", "trainer", METRICS),
        ("sessions", "trainer", HTTP),
        ("sessions", "rewarder", HTTP),
        ("sessions", "generator", NCCL),
        ("sessions", "generator", METRICS),
        ("sessions", "sessions", HTTP),
        ("rewarder", "sessions", HTTP),
        ("generator", "sessions", HTTP),
    ],
)
def test_the_connections_that_services_do_not_need_are_denied(
    source: str, target: str, port: int, several: list[Object]
) -> None:
    assert not allowed(several, place(several, source), place(several, target), port)


def test_others_reach_the_run_api_and_nothing_else(one: list[Object]) -> None:
    for workload in (*SERVICES, "redis"):
        for port in (HTTP, METRICS, REDIS, NCCL, RENDEZVOUS):
            expected = (workload, port) == ("trainer", HTTP)
            assert allowed(one, STRANGER, place(one, workload), port) is expected, f"{workload}:{port}"
            assert not allowed(one, ELSEWHERE, place(one, workload), port)


def test_the_peers_of_the_values_get_in_and_only_where_they_say() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "another"}}}
    for key, workload in (
        ("apiFrom", "trainer"), ("policyFrom", "generator"), ("rewarderFrom", "rewarder"), ("sessionsFrom", "sessions"),
    ):  # fmt: skip
        objects = render({"networkPolicy": {key: [peer]}})
        open_to = {
            name for name in (*SERVICES, "redis")
            if allowed(objects, ELSEWHERE, place(objects, name), HTTP)
        }  # fmt: skip
        assert open_to == {workload}
        assert not allowed(objects, ELSEWHERE, place(objects, workload), NCCL)


def test_prometheus_reaches_the_metrics_and_nothing_else(one: list[Object]) -> None:
    for workload in SERVICES:
        assert allowed(one, PROMETHEUS, place(one, workload), METRICS)
        assert not allowed(one, PROMETHEUS, place(one, workload), HTTP)
    assert not allowed(one, PROMETHEUS, place(one, "redis"), REDIS)


@pytest.mark.parametrize("workload", [*SERVICES, "redis", "test"])
def test_names_can_be_looked_up(workload: str, one: list[Object]) -> None:
    assert allowed(one, place(one, workload), DNS, 53, protocol="UDP")
    assert not allowed(one, place(one, workload), DNS, 443)


def test_a_name_service_of_the_node_or_on_another_port_can_be_named() -> None:
    given = {"networkPolicy": {"dnsTo": [{"ipBlock": {"cidr": "169.254.20.10/32"}}], "dnsPorts": [53, 5353]}}
    objects = render(given)
    trainer, there = place(objects, "trainer"), Place(address="169.254.20.10")
    for port, is_open in ((53, True), (5353, True), (54, False)):
        assert allowed(objects, trainer, there, port, protocol="UDP") is is_open


def test_the_hub_is_open_to_services_that_load_models_and_closed_if_it_is_disabled(one: list[Object]) -> None:
    offline = render({"hub": {"enabled": False}})
    for workload in (*SERVICES, "redis"):
        expected = workload in ("trainer", "generator")
        assert allowed(one, place(one, workload), INTERNET, 443) is expected
        assert not allowed(offline, place(offline, workload), INTERNET, 443)
        assert not allowed(one, place(one, workload), INTERNET, 80)


@pytest.mark.parametrize("target", [METADATA_SERVICE, INSIDE, Place(address="192.168.1.1"), Place(address="fd00::1")])
def test_internal_addresses_are_never_reached_through_rules_for_the_internet(
    target: Place, several: list[Object]
) -> None:
    for workload in workloads(several):
        for port in (80, 443, 8080):
            assert not allowed(several, place(several, workload), target, port)


def test_rewarders_reach_the_internet_only_if_enabled_and_on_the_ports_of_endpoints(
    one: list[Object], several: list[Object]
) -> None:
    assert not any(allowed(one, place(one, "rewarder"), INTERNET, port) for port in (80, 443, 8000))
    reached = {
        port
        for port in (80, 443, 7999, 8000, 8500, 8999, 9000)
        if allowed(several, place(several, "rewarder"), INTERNET, port)
    }
    assert reached == {443, 8000, 8500, 8999}, "allowedPorts is 443, 8000-8999"


def test_tools_reach_the_internet_only_if_enabled_and_on_the_ports_of_the_web(
    one: list[Object], several: list[Object]
) -> None:
    for port, is_open in ((80, True), (443, True), (8000, False)):
        assert not allowed(one, place(one, "sessions"), INTERNET, port)
        assert allowed(several, place(several, "sessions"), INTERNET, port) is is_open


def test_one_more_place_is_opened_by_a_rule_of_the_values() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.30.0.0/16"}}], "ports": [{"port": 443}]}
    objects = render({"networkPolicy": {"extraEgress": {"generator": [rule]}}})
    store = Place(address="10.30.1.2")
    assert allowed(objects, place(objects, "generator"), store, 443)
    assert not allowed(objects, place(objects, "trainer"), store, 443)


def test_a_redis_elsewhere_is_reached_where_it_is() -> None:
    objects = render(values_of("values-multi-node-70b.yaml"))
    redis = Place(address="10.20.3.4")
    assert "redis" not in workloads(objects)
    for workload in SERVICES:
        assert allowed(objects, place(objects, workload), redis, 6380)
        assert not allowed(objects, place(objects, workload), INSIDE, 6380)


def test_the_prometheus_of_openshift_for_users_reaches_the_metrics() -> None:
    """It runs in a namespace of its own, and alone reads ServiceMonitors outside of OpenShift's namespaces."""
    objects = render(values_of("values-8-gpu-node.yaml") | values_of("values-openshift.yaml"))
    assert of_kind(objects, "ServiceMonitor")
    prometheus = Place(labels=PROMETHEUS.labels, namespace="openshift-user-workload-monitoring")
    for workload in SERVICES:
        assert allowed(objects, prometheus, place(objects, workload), METRICS)
        assert not allowed(objects, ELSEWHERE, place(objects, workload), METRICS)


def test_network_policies_can_be_turned_off() -> None:
    assert of_kind(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == {}


def test_policies_are_of_one_release(several: list[Object]) -> None:
    other = Place(labels={**(place(several, "trainer").labels or {}), "app.kubernetes.io/instance": "other"})
    assert not allowed(several, other, place(several, "redis"), REDIS)
    assert {it["metadata"]["namespace"] for it in of_kind(several, "NetworkPolicy").values()} == {NAMESPACE}
