"""An operator's additions to the chart: labels, variables from Secrets, containers, security contexts, ingresses."""

from typing import Any

import pytest

from tests.helm.chart import SERVICES, container, of_kind, pod_spec, render, values_of, workloads
from tests.helm.test_manifests import validate_all

WORKLOADS = (*SERVICES, "redis")


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    """Return the workloads of valid objects."""
    objects = render(values)
    validate_all(objects)
    return workloads(objects)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_and_its_pods_have_labels_and_annotations_of_their_own(name: str) -> None:
    values = {
        "labels": {"kueue.x-k8s.io/queue-name": "rl"},
        "annotations": {"team": "post-training"},
        "podLabels": {"cost-centre": "7"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
    }
    found = rendered({name: values})
    workload, pod = found[name]["metadata"], found[name]["spec"]["template"]["metadata"]
    assert workload["labels"].items() >= values["labels"].items(), "where Kueue looks"
    assert workload["annotations"] == values["annotations"]
    assert pod["labels"].items() >= values["podLabels"].items()
    assert pod["annotations"].items() >= values["podAnnotations"].items()
    assert not values["labels"].keys() & pod["labels"].keys()
    others = [it for other, it in found.items() if other != name]
    assert not any("kueue" in str(it["metadata"]) for it in others)


@pytest.mark.parametrize("name", SERVICES)
def test_variables_come_from_secrets_one_by_one_or_all_of_a_secret(name: str) -> None:
    source = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    values = {"env": {"WANDB_API_KEY": {"valueFrom": source}}, "envFrom": [{"secretRef": {"name": "proxies"}}]}
    it = container(rendered({name: values})[name])
    assert {"name": "WANDB_API_KEY", "valueFrom": source} in it["env"]
    assert it["envFrom"] == values["envFrom"]


def test_nodes_with_ranks_have_what_the_trainer_has() -> None:
    values = {
        "trainer": {
            "multiNode": {"nodes": 2},
            "labels": {"queue": "rl"},
            "envFrom": [{"secretRef": {"name": "wandb"}}],
            "initContainers": [{"name": "stage", "image": "busybox"}],
            "extraContainers": [{"name": "agent", "image": "busybox"}],
        },
        "storage": {"runs": {"accessMode": "ReadWriteMany"}},
    }
    found = rendered(values)
    for name in ("trainer", "trainer-node"):
        assert found[name]["metadata"]["labels"]["queue"] == "rl"
        assert container(found[name])["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert [it["name"] for it in pod_spec(found[name])["initContainers"]] == ["stage"]
        assert [it["name"] for it in pod_spec(found[name])["containers"]][1:] == ["agent"]


@pytest.mark.parametrize("name", SERVICES)
def test_containers_of_others_start_before_ours_or_run_beside_it(name: str) -> None:
    values = {
        "initContainers": [{"name": "stage", "image": "busybox", "command": ["cp", "-r", "/a", "/b"]}],
        "extraContainers": [{"name": "agent", "image": "busybox"}],
    }
    pod = pod_spec(rendered({name: values})[name])
    assert pod["initContainers"] == values["initContainers"]
    assert [it["name"] for it in pod["containers"]] == [name, "agent"]


def test_a_security_context_is_that_of_all_with_that_of_the_workload_laid_over_it() -> None:
    found = rendered(
        {
            "podSecurityContext": {"supplementalGroups": [7]},
            "generator": {
                "podSecurityContext": {"runAsUser": 2000},
                "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            },
        }
    )
    users = {name: pod_spec(it)["securityContext"]["runAsUser"] for name, it in found.items()}
    assert users == dict.fromkeys(found, 10001) | {"generator": 2000}
    assert all(pod_spec(it)["securityContext"]["supplementalGroups"] == [7] for it in found.values())
    assert container(found["generator"])["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container(found["trainer"])["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_openshift_chooses_users_and_groups_itself() -> None:
    chosen = {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"}
    for name, workload in rendered(values_of("values-openshift.yaml")).items():
        security = pod_spec(workload)["securityContext"]
        assert not chosen & security.keys(), name
        assert security["runAsNonRoot"] is True
        assert container(workload)["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_try_out_needs_no_claims() -> None:
    objects = render({"storage": {"runs": {"emptyDir": True}}, "redis": {"persistence": {"emptyDir": True}}})
    validate_all(objects)
    assert of_kind(objects, "PersistentVolumeClaim") == {}
    found = workloads(objects)
    for name, volume, size in (("trainer", "runs", "200Gi"), ("redis", "data", "20Gi")):
        (kept,) = [it for it in pod_spec(found[name])["volumes"] if it["name"] == volume]
        assert kept == {"name": volume, "emptyDir": {"sizeLimit": size}}


def test_memory_is_shared_with_the_node_only_if_the_values_say_so() -> None:
    found = rendered({"generator": {"hostIPC": True}})
    assert {name: pod_spec(it)["hostIPC"] for name, it in found.items()} == dict.fromkeys(found, False) | {
        "generator": True
    }
    mounted = {it["mountPath"] for it in container(found["generator"])["volumeMounts"]}
    assert "/dev/shm" not in mounted, "the node's is there"
    assert "/dev/shm" in {it["mountPath"] for it in container(found["trainer"])["volumeMounts"]}


def test_a_route_of_the_gateway_api_leads_to_the_run_api_and_has_no_deadline() -> None:
    parents = [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    values = {"gateway": {"enabled": True, "parentRefs": parents, "hosts": ["rl.example.com"]}}
    (route,) = of_kind(render(values), "HTTPRoute").values()
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == parents
    assert route["spec"]["hostnames"] == ["rl.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule == {"timeouts": {"request": "0s"}, "backendRefs": [{"name": "headrace-trainer", "port": 8000}]}
    assert not of_kind(render(), "HTTPRoute")


def test_more_objects_are_manifests_or_templates() -> None:
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-more"},
        "data": {"a": "b"},
    }
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: of-{{ .Release.Namespace }}}"
    objects = render({"extraObjects": [config, text]})
    names = {it["metadata"]["name"] for it in objects if it["kind"] == "ConfigMap"}
    assert {"headrace-more", "of-rl"} <= names


def test_secrets_of_a_registry_are_named_as_in_a_pod() -> None:
    for workload in rendered({"images": {"pullSecrets": [{"name": "login"}]}}).values():
        assert pod_spec(workload)["imagePullSecrets"] == [{"name": "login"}]
