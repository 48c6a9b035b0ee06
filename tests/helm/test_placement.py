"""Where pods run: near the claims that they share, spread over nodes, and where the values put them."""

from typing import Any

import pytest

from tests.helm.chart import (
    ALL_VALUES,
    SERVICES,
    Object,
    of_kind,
    pod_spec,
    render,
    values_of,
    workloads,
)


def drawn_to_the_trainer(found: dict[str, Object]) -> set[str]:
    """Return the services that are scheduled only on the trainer's node."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {name for name in SERVICES if required in str(pod_spec(found[name]).get("affinity", {}).get("podAffinity"))}


def test_replicas_spread_over_nodes_unless_values_say_otherwise() -> None:
    (spread,) = pod_spec(workloads(render())["generator"])["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    own = [{"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}]
    found = workloads(render({"generator": {"topologySpreadConstraints": own}}))["generator"]
    (spread,) = pod_spec(found)["topologySpreadConstraints"]
    assert spread.items() >= own[0].items()
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "generator"


@pytest.mark.parametrize("name", ALL_VALUES)
def test_whoever_mounts_a_claim_that_one_node_can_have_is_on_the_trainers_node(name: str) -> None:
    objects = render(values_of(name))
    claims = of_kind(objects, "PersistentVolumeClaim")
    single = {it["metadata"]["name"] for it in claims.values() if it["spec"]["accessModes"] == ["ReadWriteOnce"]}
    found = workloads(objects)
    for workload, it in found.items():
        claimed = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod_spec(it)["volumes"]
            if "persistentVolumeClaim" in volume
        }
        if workload in ("trainer", "redis") or not claimed & single:
            continue
        (beside,) = pod_spec(it)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels = found["trainer"]["spec"]["template"]["metadata"]["labels"]
        assert beside["topologyKey"] == "kubernetes.io/hostname"
        assert beside["labelSelector"]["matchLabels"].items() <= labels.items()


def test_beside_the_trainer_is_added_to_what_the_values_ask_for() -> None:
    wish: dict[str, list[Any]] = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    values = {"generator": {"affinity": {"podAffinity": wish, "nodeAffinity": wish}},
              "storage": {"models": {"enabled": True, "accessMode": "ReadWriteOnce"}}}  # fmt: skip
    affinity = pod_spec(workloads(render(values))["generator"])["affinity"]
    assert affinity["nodeAffinity"] == wish
    assert affinity["podAffinity"].items() > wish.items()
    shared = {"storage": {"models": {"enabled": True, "accessMode": "ReadWriteMany"}}}
    assert "affinity" not in pod_spec(workloads(render(shared))["generator"])


@pytest.mark.parametrize(("claim", "beside"), [("code", {"rewarder", "sessions"}), ("models", {"generator"})])
def test_a_claim_of_one_node_draws_only_the_services_that_mount_it_there(claim: str, beside: set[str]) -> None:
    one_node = workloads(render({"storage": {claim: {"enabled": True, "accessMode": "ReadWriteOnce"}}}))
    assert drawn_to_the_trainer(one_node) == beside
    shared = workloads(render({"storage": {claim: {"enabled": True}}}))
    assert not [name for name in SERVICES if "affinity" in pod_spec(shared[name])]


def test_a_claim_of_the_values_that_one_node_can_have_draws_the_services_there_too() -> None:
    own = {"enabled": True, "existingClaim": "mine", "accessMode": "ReadWriteOnce"}
    assert drawn_to_the_trainer(workloads(render({"storage": {"models": own}}))) == {"generator"}


@pytest.mark.parametrize(
    ("claims", "beside"),
    [
        (["models"], ["generator"]),
        (["uploads"], ["generator"]),
        (["code"], ["rewarder", "sessions"]),
        (["models", "code"], ["generator", "rewarder", "sessions"]),
    ],
)
def test_a_trainer_that_comes_back_prefers_the_node_that_has_its_claims(claims: list[str], beside: list[str]) -> None:
    """On another node it would wait for ever: the other pods keep a ReadWriteOnce claim on theirs."""
    wish: list[Any] = [{"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}]
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    values: dict[str, Any] = {
        "trainer": {"affinity": {"podAffinity": {preferred: wish}}},
        "storage": {name: {"enabled": True, "accessMode": "ReadWriteOnce"} for name in claims},
    }
    found = workloads(render(values))
    own, ours = pod_spec(found["trainer"])["affinity"]["podAffinity"][preferred]
    assert own == wish[0], "the values' own wishes stay"
    assert ours["weight"] == 100
    term = ours["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    (wanted,) = term["labelSelector"]["matchExpressions"]
    assert wanted == {"key": "app.kubernetes.io/component", "operator": "In", "values": beside}
    for name in beside:
        labels = found[name]["spec"]["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("service", ["rewarder", "sessions"])
def test_the_affinity_of_a_service_that_runs_code_of_clients_stays(service: str) -> None:
    wish: dict[str, list[Any]] = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    values: dict[str, Any] = {service: {"affinity": {"nodeAffinity": wish}}}
    assert pod_spec(workloads(render(values))[service])["affinity"] == {"nodeAffinity": wish}
    values["storage"] = {"code": {"enabled": True, "accessMode": "ReadWriteOnce"}}
    affinity = pod_spec(workloads(render(values))[service])["affinity"]
    assert affinity.keys() == {"nodeAffinity", "podAffinity"}
    assert affinity["nodeAffinity"] == wish


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_helm_test_can_run_where_the_trainer_runs(name: str) -> None:
    found = workloads(render(values_of(name)))
    trainer, test = pod_spec(found["trainer"]), pod_spec(found["test"])
    for key in ("nodeSelector", "tolerations", "runtimeClassName"):
        assert test.get(key) == trainer.get(key)


@pytest.mark.parametrize("workload", SERVICES)
def test_where_pods_go_is_the_values_to_say(workload: str) -> None:
    wishes: dict[str, Any] = {
        "priorityClassName": "training",
        "runtimeClassName": "nvidia",
        "schedulerName": "kai-scheduler",
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    }
    own = {"podLabels": {"kueue.x-k8s.io/queue-name": "rl"}, "podAnnotations": {"a": "b"}}
    it = workloads(render({workload: wishes | own}))[workload]
    assert pod_spec(it).items() >= wishes.items()
    metadata = it["spec"]["template"]["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    assert metadata["annotations"]["a"] == "b"
