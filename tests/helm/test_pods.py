"""How pods run: unprivileged, with probes, GPUs and time to end, replaced in order and protected from drains."""

import json
import re
from typing import Any

import pytest

from shared import health_check
from tests.helm.chart import (
    ALL_VALUES,
    CHART,
    NAMESPACE,
    SERVICES,
    VALUES_FILES,
    Object,
    container,
    environment,
    leaves,
    mounts,
    notes,
    of_kind,
    pod_spec,
    render,
    values_of,
    workloads,
)

HEALTH_CHECK = ["python3", "-m", "shared.health_check"]


def all_workloads(name: str) -> dict[str, Object]:
    return workloads(render(values_of(name)))


@pytest.mark.parametrize("name", ALL_VALUES)
def test_every_container_runs_without_privileges_on_a_read_only_root(name: str) -> None:
    found = all_workloads(name)
    assert {*SERVICES, "test"} <= found.keys()
    for workload in found.values():
        pod, security = pod_spec(workload), container(workload)["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        user = None if name == "values-openshift.yaml" else 10001
        assert [pod["securityContext"].get(key) for key in ("runAsUser", "runAsGroup", "fsGroup")] == [user] * 3
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert pod["automountServiceAccountToken"] is False
        assert [pod[key] for key in ("hostNetwork", "hostIPC", "hostPID")] == [False] * 3
        assert pod["shareProcessNamespace"] is True, "an init process reaps zombies"
        assert "initContainers" not in pod, "an init container that waits for another workload deadlocks a gang"
        assert len(pod["containers"]) == 1
        assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize("name", ALL_VALUES)
def test_no_capability_is_ever_added(name: str) -> None:
    """RDMA does not need IPC_LOCK either: a process that does not start as root never gets it."""
    assert all(
        container(it)["securityContext"]["capabilities"] == {"drop": ["ALL"]} for it in all_workloads(name).values()
    )


@pytest.mark.parametrize("name", ALL_VALUES)
def test_no_link_to_a_service_sets_variables_that_are_named_like_ours(name: str) -> None:
    """A Service called headrace would set HEADRACE_PORT=tcp://10.0.0.1:8000 in every pod of the namespace."""
    assert all(pod_spec(it)["enableServiceLinks"] is False for it in all_workloads(name).values())


@pytest.mark.parametrize(
    ("workload", "startup", "readiness"),
    [
        ("trainer", [], []),
        ("rewarder", [], []),
        ("sessions", [], []),
        # The generator has started while it still waits for a run, a model or weights. It is ready with the required
        # weights; without a run, none are required.
        ("generator", ["--or-waiting"], ["--or-idle"]),
    ],
)
def test_probes_ask_from_inside_with_the_mounted_key(workload: str, startup: list[str], readiness: list[str]) -> None:
    it = container(all_workloads("default")[workload])
    assert it["startupProbe"]["exec"]["command"] == HEALTH_CHECK + startup
    assert it["readinessProbe"]["exec"]["command"] == HEALTH_CHECK + readiness
    # The liveness probe does not depend on Redis: a short failure of Redis must not restart all services.
    assert it["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert it["livenessProbe"]["periodSeconds"] * it["livenessProbe"]["failureThreshold"] >= 60
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert it[probe]["timeoutSeconds"] >= health_check.TIMEOUT_S + 1, "longer than the check itself waits"
        assert "Authorization" not in str(it[probe]), "no pod description contains a key"


@pytest.mark.parametrize("workload", SERVICES)
def test_startup_lasts_longer_than_the_patience_with_redis(workload: str) -> None:
    probe = container(workloads(render({workload: {"redisPatienceSeconds": 900}}))[workload])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 900


def test_redis_is_alive_while_it_reads_its_file_and_ready_when_it_answers() -> None:
    redis = container(all_workloads("default")["redis"])
    assert "tcpSocket" in redis["livenessProbe"]
    assert redis["readinessProbe"]["exec"]["command"] == ["sh", "/etc/headrace/redis/health.sh"]
    assert "startupProbe" not in redis


def test_a_machine_with_ranks_is_judged_by_its_heartbeat() -> None:
    values = values_of("everything") | {"trainer": {"multiNode": {"nodes": 2}, "rankStopGraceSeconds": 300}}
    it = container(workloads(render(values))["trainer-node"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert '"/tmp/heartbeat"' in it[probe]["exec"]["command"][2]
        assert it[probe]["exec"]["command"][2].endswith("> 360)"), (
            "it sends no heartbeat while it waits for ranks to end"
        )


def test_pods_get_the_time_they_need_to_end() -> None:
    values = {
        "trainer": {"rankStopGraceSeconds": 100},
        "generator": {"preStopSeconds": 20},
        "rewarder": {"preStopSeconds": 20, "drainSeconds": 90},
        "sessions": {"preStopSeconds": 20},
    }
    found = workloads(render(values))
    grace = {name: pod_spec(it).get("terminationGracePeriodSeconds") for name, it in found.items()}
    assert grace["trainer"] == 130
    assert grace["generator"] == 50, "20 before SIGTERM, at most 10 after it, and some"
    assert grace["rewarder"] == 130, "20 before SIGTERM, 90 for its groups, 5 for requests, and some"
    assert grace["sessions"] == 40, "20 before SIGTERM, 5 for requests, and some"
    for name in ("generator", "rewarder", "sessions"):
        assert container(found[name])["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "20"]}}


def test_gpus_are_limits_of_the_workloads_that_have_them() -> None:
    values = {
        "trainer": {"gpus": 4},
        "generator": {"gpus": 2, "engineArgs": {"tensor_parallel_size": 2}},
        "rewarder": {"gpus": 1},
        "gpuResourceName": "amd.com/gpu",
    }
    found = workloads(render(values))
    gpus = {name: container(it)["resources"]["limits"].get("amd.com/gpu") for name, it in found.items()}
    assert gpus == {"trainer": 4, "generator": 2, "rewarder": 1, "sessions": None, "redis": None, "test": None}


def test_without_gpus_no_workload_asks_for_one_and_the_cpu_images_are_used() -> None:
    found = all_workloads("values-kind.yaml")
    assert "gpu" not in str([container(it)["resources"] for it in found.values()])
    ours = [container(found[name])["image"] for name in (*SERVICES, "test")]
    assert ours == [f"headrace-{name}:0.1.0-cpu" for name in (*SERVICES, "trainer")]


def test_a_pod_without_a_gpu_sees_none_even_if_the_nvidia_runtime_is_the_default() -> None:
    def visible(values: dict[str, Any]) -> dict[str, str | None]:
        found = workloads(render(values))
        return {name: environment(it, pod="p").get("NVIDIA_VISIBLE_DEVICES") for name, it in found.items()}

    without = dict.fromkeys(("trainer", "generator", "redis")) | dict.fromkeys(("rewarder", "sessions", "test"), "void")
    assert visible({}) == without
    assert visible({"rewarder": {"gpus": 1}}) == without | {"rewarder": None}, "the device plugin says which"


def test_a_rewarder_without_a_gpu_runs_the_image_without_cuda() -> None:
    images = {gpus: container(workloads(render({"rewarder": {"gpus": gpus}}))["rewarder"])["image"] for gpus in (0, 1)}
    assert images == {0: "headrace-rewarder:0.1.0-cpu", 1: "headrace-rewarder:0.1.0"}
    assert container(workloads(render())["sessions"])["image"] == "headrace-sessions:0.1.0-cpu", "it has only this one"


def test_rdma_devices_go_where_nccl_is() -> None:
    found = all_workloads("values-multi-node-70b.yaml")
    devices = {
        name for name, it in found.items() if "rdma/hca_shared_devices_a" in container(it)["resources"]["limits"]
    }
    assert devices == {"trainer", "trainer-node", "generator"}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_every_container_says_what_it_needs(name: str) -> None:
    for workload in all_workloads(name).values():
        resources = container(workload)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]


def test_shared_memory_is_memory_with_a_limit() -> None:
    found = all_workloads("default")
    for name in ("trainer", "generator"):
        assert mounts(found[name])["/dev/shm"]["volume"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_whatever_is_written_to_a_nodes_disk_has_a_limit(name: str) -> None:
    """Otherwise one pod could fill the disk, and the kubelet would evict others, such as the trainer, to free space."""
    for workload, it in all_workloads(name).items():
        kept = [volume for volume in pod_spec(it)["volumes"] if "emptyDir" in volume]
        assert kept, workload
        assert all(volume["emptyDir"].get("sizeLimit") for volume in kept), f"{workload}: {kept}"


def test_a_cache_has_the_size_of_the_values_and_survives_its_pod_if_they_say_so() -> None:
    claimed = {"persistent": True, "size": "300Gi", "storageClassName": "ssd"}
    values: dict[str, Any] = {
        "trainer": {"multiNode": {"nodes": 2}, "cache": claimed},
        "generator": {"cache": {"size": "70Gi"}},
        "rewarder": {"cache": {"size": "30Gi"}},
        "storage": {"runs": {"accessMode": "ReadWriteMany"}, "tmpSize": "4Gi"},
    }
    found = workloads(render(values))
    for name in ("trainer", "trainer-node"):
        (claim,) = found[name]["spec"]["volumeClaimTemplates"]
        assert mounts(found[name])["/cache"]["volume"] == claim, "and no volume of the pod by that name"
        assert claim["spec"]["resources"]["requests"]["storage"] == "300Gi"
        assert claim["spec"]["storageClassName"] == "ssd"
        assert "cache" not in {volume["name"] for volume in pod_spec(found[name])["volumes"]}
    assert mounts(found["generator"])["/cache"]["volume"]["emptyDir"] == {"sizeLimit": "70Gi"}
    assert mounts(found["rewarder"])["/cache"]["volume"]["emptyDir"] == {"sizeLimit": "30Gi"}
    assert "volumeClaimTemplates" not in found["generator"]["spec"]
    assert {mounts(it)["/tmp"]["volume"]["emptyDir"]["sizeLimit"] for name, it in found.items() if name != "redis"} == {
        "4Gi"
    }


def test_a_digest_wins_over_the_tag() -> None:
    digest = "sha256:" + "a" * 64
    values = {"images": {"registry": "example.com/rl/", "tag": "1.2.3", "generator": {"digest": digest}}}
    found = workloads(render(values))
    assert container(found["generator"])["image"] == f"example.com/rl/headrace-generator@{digest}"
    assert container(found["rewarder"])["image"] == "example.com/rl/headrace-rewarder:1.2.3-cpu"


def test_generators_have_stable_names_that_resolve_before_they_are_ready() -> None:
    objects = render()
    generator, service = of_kind(objects, "StatefulSet")["generator"], of_kind(objects, "Service")["generators"]
    assert generator["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert generator["spec"]["podManagementPolicy"] == "Parallel", "none waits for another to be ready"


def test_the_public_services_show_ready_pods_only() -> None:
    services = of_kind(render(), "Service")
    for name in ("trainer", "policy", "rewarder", "sessions"):
        assert not services[name]["spec"].get("publishNotReadyAddresses")
        assert services[name]["spec"].get("clusterIP") != "None"
    assert [port["name"] for port in services["trainer"]["spec"]["ports"]] == ["http"], "no metrics, no rendezvous"
    assert [port["name"] for port in services["policy"]["spec"]["ports"]] == ["http"]


@pytest.mark.parametrize("name", ALL_VALUES)
def test_every_service_selects_pods_and_names_a_port_of_theirs(name: str) -> None:
    objects = render(values_of(name))
    for service in of_kind(objects, "Service").values():
        selected = [
            it
            for it in workloads(objects).values()
            if it["kind"] != "Pod"
            and service["spec"]["selector"].items() <= it["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert selected, service["metadata"]["name"]
        ports = {port["name"] for it in selected for port in container(it).get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_ranks_of_several_machines_are_one_a_node_and_number_themselves() -> None:
    objects = render(values_of("values-multi-node-70b.yaml"))
    sets = of_kind(objects, "StatefulSet")
    first, others = sets["trainer"], sets["trainer-node"]
    assert (first["spec"]["replicas"], others["spec"]["replicas"]) == (1, 3)
    assert others["spec"]["ordinals"] == {"start": 1}
    command = container(others)["command"]
    assert command[command.index("--node-rank") + 1] == "$(HEADRACE_REPLICA_ID)", "headrace-trainer-node-1 is node 1"
    for it in (first, others):
        (apart,) = pod_spec(it)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels = it["spec"]["template"]["metadata"]["labels"]
        assert apart["labelSelector"]["matchLabels"].items() <= labels.items()
        assert apart["topologyKey"] == "kubernetes.io/hostname"
        assert "/runs" in mounts(it)
        assert mounts(it)["/runs"]["volume"] == mounts(first)["/runs"]["volume"]
    assert pod_spec(first)["affinity"]["podAffinity"], "the settings of the values stay"


def test_one_machine_has_no_rendezvous() -> None:
    objects = render()
    assert "trainer-node" not in of_kind(objects, "StatefulSet")
    assert "RENDEZVOUS" not in str(objects)
    assert "rendezvous" not in {port["name"] for port in container(workloads(objects)["trainer"])["ports"]}


@pytest.mark.parametrize("name", VALUES_FILES)
def test_the_run_of_the_helm_test_is_one_that_these_generators_can_take(name: str) -> None:
    values = values_of(name)
    heads = [
        int(found) for found in re.findall(r"num_\w+_heads=(\d+)", (CHART / "files/test/tiny_model.py").read_text())
    ]
    assert len(heads) == 2
    parallel = values.get("generator", {}).get("engineArgs", {}).get("tensor_parallel_size", 1)
    assert all(number % parallel == 0 for number in heads)
    run = json.loads(container(all_workloads(name)["test"])["command"][5])
    if name == "values-one-gpu-node.yaml":
        assert run["weight_transport"] == "gloo", "memory of a GPU is handed over within one pod only"


def test_nothing_drains_the_node_of_a_run_and_replicas_go_one_at_a_time() -> None:
    objects = render(values_of("everything"))
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert {name: it["spec"]["maxUnavailable"] for name, it in budgets.items()} == {
        "trainer": 0, "generator": 1, "rewarder": 1, "sessions": 1,
    }  # fmt: skip
    pods = {
        name: it["spec"]["template"]["metadata"]["labels"] for name, it in workloads(objects).items() if name != "test"
    }
    for name, budget in budgets.items():
        kept = {
            pod for pod, labels in pods.items() if budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        }
        assert kept == ({"trainer", "trainer-node"} if name == "trainer" else {name})
        # A generator that is not ready does no work. But a trainer's ranks go on during a short failure of Redis.
        policy = "IfHealthyBudget" if name == "trainer" else "AlwaysAllow"
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == policy


@pytest.mark.parametrize("name", ["rewarder", "sessions"])
def test_a_deployment_can_be_replaced_without_a_moment_with_fewer(name: str) -> None:
    strategy = of_kind(render(), "Deployment")[name]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_an_update_of_a_rewarder_with_a_gpu_needs_no_spare_one() -> None:
    strategy = of_kind(render({"rewarder": {"gpus": 1}}), "Deployment")["rewarder"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_a_pod_that_cannot_start_after_a_change_is_replaced_by_the_next_change(name: str) -> None:
    """With OrderedReady, a StatefulSet waits for it for ever; someone would have to delete the pod."""
    sets = of_kind(render(values_of(name)), "StatefulSet")
    assert {it["spec"].get("podManagementPolicy") for it in sets.values()} == {"Parallel"}


def test_labels_of_pods_have_no_version_so_that_a_new_chart_by_itself_restarts_nothing() -> None:
    for name, it in workloads(render()).items():
        if name != "test":
            assert "0.1.0" not in str(it["spec"]["template"]["metadata"])


def test_trained_runs_outlive_the_release() -> None:
    objects = render(values_of("everything"))
    claims = of_kind(objects, "PersistentVolumeClaim")
    assert claims.keys() == {"runs", "models", "code", "weights", "redis"}
    kept = [*claims.values(), of_kind(objects, "Secret")["keys"]]
    assert {it["metadata"]["annotations"]["helm.sh/resource-policy"] for it in kept} == {"keep"}


def test_claims_of_the_values_take_the_place_of_ours() -> None:
    values = {
        "storage": {
            "runs": {"existingClaim": "my-runs"},
            "models": {"enabled": True, "existingClaim": "my-models"},
            "code": {"enabled": True, "existingClaim": "my-code"},
        },
        "redis": {"persistence": {"existingClaim": "my-redis"}},
    }
    objects = render(values)
    assert of_kind(objects, "PersistentVolumeClaim") == {}
    found = workloads(objects)
    assert mounts(found["trainer"])["/runs"]["volume"]["persistentVolumeClaim"]["claimName"] == "my-runs"
    assert mounts(found["generator"])["/models"]["volume"]["persistentVolumeClaim"]["claimName"] == "my-models"
    assert mounts(found["generator"])["/models"]["readOnly"] is True
    assert mounts(found["redis"])["/data"]["volume"]["persistentVolumeClaim"]["claimName"] == "my-redis"
    for service in ("trainer", "rewarder", "sessions"):
        assert mounts(found[service])["/code"]["volume"]["persistentVolumeClaim"]["claimName"] == "my-code"


def test_a_claim_of_models_that_can_only_be_read_is_mounted_so_and_nothing_is_written_into_it() -> None:
    models = {"enabled": True, "existingClaim": "my-models", "accessMode": "ReadOnlyMany"}
    found = workloads(
        render(
            {
                "storage": {"models": models, "runs": {"accessMode": "ReadWriteMany"}},
                "trainer": {"multiNode": {"nodes": 2}},
            }
        )
    )
    for name in ("trainer", "trainer-node", "generator"):
        claim = mounts(found[name])["/models"]["volume"]["persistentVolumeClaim"]
        assert claim == {"claimName": "my-models", "readOnly": True}
    assert "/models" not in mounts(found["test"])
    assert "/models" not in container(found["test"])["command"]
    assert "does not have a model" in notes({"storage": {"models": models}})


@pytest.mark.parametrize("name", ALL_VALUES)
def test_keys_are_files_of_a_secret_and_each_service_has_its_own_password_only(name: str) -> None:
    for workload, it in all_workloads(name).items():
        files = {item["path"] for item in mounts(it)["/run/secrets/headrace"]["volume"]["secret"]["items"]}
        expected = {
            "test": {"api-key"},
            "trainer-node": {"api-key", "internal-key"},
            "rewarder": {"api-key", "redis-password-rewarder"},
            "redis": {f"redis-password-{service}" for service in SERVICES},
        }.get(workload, {"api-key", "internal-key", f"redis-password-{workload}"})
        assert files == expected


def test_a_secret_of_the_values_takes_the_place_of_ours_everywhere() -> None:
    objects = render({"secrets": {"existingSecret": "mine"}})
    assert of_kind(objects, "Secret") == {}
    names = {value for it in objects for path, value in leaves(it) if path[-1] == "secretName"}
    assert names == {"mine"}


def test_made_keys_are_long_and_all_different() -> None:
    data = of_kind(render(), "Secret")["keys"]["data"]
    assert data.keys() == {
        "api-key", "internal-key", *(f"redis-password-{service}" for service in SERVICES),
    }  # fmt: skip
    assert len(set(data.values())) == 6
    assert all(len(value) >= 56 for value in data.values()), "43 characters of 62, in base64"


def test_the_sandbox_may_have_its_own_seccomp_profile() -> None:
    profile = {"type": "Localhost", "localhostProfile": "profiles/userns.json"}
    found = workloads(render({"rewarder": {"sandbox": {"seccompProfile": profile}}}))
    assert pod_spec(found["rewarder"])["securityContext"]["seccompProfile"] == profile
    assert pod_spec(found["generator"])["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_workload_with_an_autoscaler_has_no_number_of_replicas() -> None:
    objects = render(values_of("everything"))
    assert "replicas" not in of_kind(objects, "StatefulSet")["generator"]["spec"]
    assert not [name for name, it in of_kind(objects, "Deployment").items() if "replicas" in it["spec"]]
    assert of_kind(render(), "StatefulSet")["generator"]["spec"]["replicas"] == 1


def test_the_helm_test_is_a_hook_and_ends() -> None:
    pod = all_workloads("values-kind.yaml")["test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["namespace"] == NAMESPACE
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["activeDeadlineSeconds"] == 900 + 120
    assert container(pod)["command"][-1] == "/models", "the directory of its tiny model"
    assert of_kind(render({"test": {"enabled": False}}), "Pod") == {}
