"""The chart for tests: rendered by Helm's own engine, without a cluster."""

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk, and the chart is tested")
helm_chart = pytest.importorskip("helm_python.chart")

CHART = Path(__file__).resolve().parent.parent.parent / "deploy" / "helm" / "headrace"
VALUES_FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))
RELEASE, NAMESPACE = "headrace", "rl"
SERVICES = ("trainer", "generator", "rewarder", "sessions")

Object = dict[str, Any]

EVERYTHING: dict[str, Any] = {
    "secrets": {"apiKeysSecret": "named-keys"},
    "tls": {"secretName": "certificate"},
    "images": {"registry": "registry.example.com/rl", "pullSecrets": [{"name": "pull"}]},
    "trainer": {
        "multiNode": {"nodes": 3},
        "cache": {"persistent": True},
        "priorityClassName": "training",
        "runtimeClassName": "nvidia",
    },
    "generator": {
        "cache": {"persistent": True},
        "autoscaling": {"enabled": True, "kind": "hpa"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "rewarder": {
        "rewardModules": {"configMap": "rewards"},
        "endpoints": {"allowedPorts": "443, 8000-8999", "secretsSecret": "endpoints", "allowedHosts": "judge.ml:8000"},
        "autoscaling": {"enabled": True, "kind": "keda"},
    },
    "sessions": {
        "toolModules": {"existingClaim": "tools"},
        "autoscaling": {"enabled": True, "kind": "keda"},
    },
    "storage": {
        "runs": {"accessMode": "ReadWriteMany"},
        "models": {"enabled": True},
        "code": {"enabled": True},
        "weights": {"enabled": True},
    },
    "hub": {"tokenSecret": "hub"},
    "ingress": {"enabled": True, "hosts": ["rl.example.com"], "tlsSecret": "tls", "className": "nginx"},
    "networkPolicy": {"rewarderInternet": True, "sessionsInternet": True},
    "nccl": {"rdma": {"enabled": True}},
    "metrics": {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}
"""Values that turn on every feature that can be used together."""


def values_of(name: str) -> dict[str, Any]:
    """Return the content of a values file; ``everything`` is the one above, and ``default`` is empty."""
    if name == "everything":
        return copy.deepcopy(EVERYTHING)
    if name == "default":
        return {}
    values: dict[str, Any] = yaml.safe_load((CHART / name).read_text())
    return values


ALL_VALUES = ["default", "everything", *VALUES_FILES]


def render(values: Mapping[str, Any] | None = None, *, release: str = RELEASE) -> list[Object]:
    """Return the objects of a release with these values.

    Raises:
        HelmError: Helm refuses them.
    """
    return list(_rendered(json.dumps(values or {}), release))


@functools.cache
def _rendered(values: str, release: str) -> tuple[Object, ...]:
    files = _loaded().render(json.loads(values), name=release, namespace=NAMESPACE)
    manifests = {path: text for path, text in files.items() if path.endswith(".yaml")}
    return tuple(found for text in manifests.values() for found in yaml.safe_load_all(text) if found)


@functools.cache
def _loaded() -> Any:
    return helm_chart.Chart.load(CHART)


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the notes that Helm prints after an install."""
    files = _loaded().render(dict(values or {}), name=RELEASE, namespace=NAMESPACE)
    (text,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return str(text)


def why_refused(values: Mapping[str, Any], *, release: str = RELEASE) -> str:
    """Return Helm's error for values that it must refuse."""
    with pytest.raises(helm.HelmError) as refusal:
        render(values, release=release)
    return str(refusal.value)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """Return the objects of a kind, by their names without the release's name."""
    found = [it for it in objects if it["kind"] == kind]
    return {it["metadata"]["name"].removeprefix(f"{RELEASE}-"): it for it in found}


def workloads(objects: list[Object]) -> dict[str, Object]:
    """Return StatefulSets, Deployments and the pod of ``helm test`` by name."""
    return {name: it for kind in ("StatefulSet", "Deployment", "Pod") for name, it in of_kind(objects, kind).items()}


def pod_spec(workload: Object) -> Object:
    """Return the pod spec of a workload."""
    spec: Object = workload["spec"] if workload["kind"] == "Pod" else workload["spec"]["template"]["spec"]
    return spec


def container(workload: Object) -> Object:
    """Return our container in a workload's pods, which is the first. Values may add others."""
    found: Object = pod_spec(workload)["containers"][0]
    return found


def environment(workload: Object, *, pod: str) -> dict[str, str]:
    """Return the variables of a container in a pod of this name, as the kubelet would set them."""
    fields = {"metadata.name": pod, "status.podIP": "10.1.2.3"}
    variables: dict[str, str] = {}
    for entry in container(workload).get("env", []):
        source = entry.get("valueFrom", {})
        text: str = fields[source["fieldRef"]["fieldPath"]] if source else entry["value"]
        for name, known in variables.items():
            text = text.replace(f"$({name})", known)
        variables[entry["name"]] = text
    return variables


def mounts(workload: Object) -> dict[str, Object]:
    """Return the mounts of a container by path, each with its volume."""
    volumes = {volume["name"]: volume for volume in pod_spec(workload).get("volumes", [])}
    claimed = {it["metadata"]["name"]: it for it in workload["spec"].get("volumeClaimTemplates", [])}
    return {
        it["mountPath"]: {**it, "volume": {**claimed, **volumes}[it["name"]]}
        for it in container(workload)["volumeMounts"]
    }


def leaves(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every scalar in a manifest with its path."""
    if isinstance(node, dict):
        for key, inner in cast("dict[str, Any]", node).items():
            yield from leaves(inner, (*path, key))
    elif isinstance(node, list):
        items = cast("list[object]", node)
        for index, inner in enumerate(items):
            yield from leaves(inner, (*path, str(index)))
    else:
        yield path, node
