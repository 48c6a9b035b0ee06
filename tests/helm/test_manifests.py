"""Every values file renders to objects that Kubernetes accepts, field by field, in three of its versions."""

import functools
import ipaddress
import json
from typing import Any

import pytest

from tests.helm.chart import ALL_VALUES, CHART, NAMESPACE, Object, of_kind, render, values_of

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate, and the chart's objects are validated"
)

VERSIONS = ["1.30", "1.33", "1.37"]
OTHERS = {"HTTPRoute", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
"""Kinds that are not part of Kubernetes; other tests check them."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL_VALUES)
def test_kubernetes_takes_every_object_strictly(name: str, version: str) -> None:
    objects = render(values_of(name))
    assert len(objects) > 15
    validate_all(objects, version)


def validate_all(objects: list[Object], version: str = VERSIONS[-1]) -> None:
    """Raise if Kubernetes would refuse a manifest."""
    for it in objects:
        if it["kind"] not in OTHERS:
            validate(json.dumps(it), version)


@functools.cache
def validate(manifest: str, version: str) -> None:
    """Raise if Kubernetes would refuse the manifest. Identical manifests of several values files are checked once."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def test_the_validation_would_notice_a_field_that_is_misspelt() -> None:
    (service, *_) = [it for it in render() if it["kind"] == "Service"]
    broken: dict[str, Any] = {**service, "spec": {**service["spec"], "publishNotReadyAdresses": True}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_exceptions_of_an_address_block_are_part_of_it_as_the_api_server_requires(name: str) -> None:
    """Kubernetes treats IPv4 addresses written as IPv6 as IPv4, so they are in no IPv6 block."""
    policies = [it for it in render(values_of(name)) if it["kind"] == "NetworkPolicy"]
    blocks = [block for it in policies for block in _blocks(it["spec"])]
    assert blocks
    for block in blocks:
        whole = ipaddress.ip_network(block["cidr"])
        for left_out in (ipaddress.ip_network(text) for text in block.get("except", [])):
            assert left_out.version == whole.version
            assert left_out.prefixlen > whole.prefixlen
            assert int(whole.network_address) <= int(left_out.network_address) <= int(whole.broadcast_address)
            assert getattr(left_out.network_address, "ipv4_mapped", None) is None, left_out


def _blocks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [*(spec.get("ingress") or []), *(spec.get("egress") or [])]
    peers: list[dict[str, Any]] = [peer for rule in rules for peer in (*rule.get("from", []), *rule.get("to", []))]
    return [peer["ipBlock"] for peer in peers if "ipBlock" in peer]


@pytest.mark.parametrize("name", ALL_VALUES)
def test_names_are_unique_short_and_in_the_release_namespace(name: str) -> None:
    objects = render(values_of(name))
    names = [(it["kind"], it["metadata"]["name"]) for it in objects]
    assert len(set(names)) == len(names)
    # A StatefulSet adds a pod's ordinal and, to a label, a hash.
    assert all(len(own) <= 52 for _, own in names)
    assert {it["metadata"]["namespace"] for it in objects} == {NAMESPACE}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_objects_that_a_pod_names_exist_or_are_in_the_values(name: str) -> None:
    """Claims and ConfigMaps with the chart's own names exist. All others are named in the values."""
    objects = render(values_of(name))
    own = {(it["kind"], it["metadata"]["name"]) for it in objects}
    given = str(values_of(name))
    for workload in objects:
        if workload["kind"] not in ("StatefulSet", "Deployment", "Pod"):
            continue
        spec = workload["spec"] if workload["kind"] == "Pod" else workload["spec"]["template"]["spec"]
        for volume in spec["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            config = volume.get("configMap", {}).get("name")
            secret = volume.get("secret", {}).get("secretName")
            for kind, wanted in (("PersistentVolumeClaim", claim), ("ConfigMap", config), ("Secret", secret)):
                assert wanted is None or (kind, wanted) in own or wanted in given, f"{kind} {wanted}"


@pytest.mark.parametrize(
    ("live", "replicas"),
    [
        ({"spec": {"replicas": 4}}, {"replicas": 4}),
        ({}, {}),  # at an install: Kubernetes sets 1, and the autoscaler raises it to its minimum
        ({"spec": {"replicas": 0}}, {}),  # an HPA scales nothing up from 0
    ],
)
def test_an_autoscaler_that_is_turned_on_finds_the_replicas_that_run(live: Object, replicas: Object) -> None:
    """Without a number in the manifest, Kubernetes would set it to 1."""
    call = """include "headrace.replicasBeside" (dict "of" .Values.generator "live" (fromJson `LIVE`))"""
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: added}\ndata: {{ CALL | fromYaml | toJson }}"
    added = text.replace("CALL", call.replace("LIVE", json.dumps(live)))
    objects = render({"generator": {"autoscaling": {"enabled": True}}, "extraObjects": [added]})
    (found,) = [it for it in objects if it["metadata"]["name"] == "added"]
    assert found["data"] == replicas


@pytest.mark.parametrize("name", ["generator", "rewarder", "sessions"])
def test_the_replicas_that_run_are_looked_up_in_the_workload_itself(name: str) -> None:
    (kind,) = [kind for kind in ("StatefulSet", "Deployment") if name in of_kind(render(), kind)]
    template = (CHART / "templates" / f"{name}.yaml").read_text()
    assert f'include "headrace.replicas" (merge (dict "kind" "{kind}") $ctx)' in template
