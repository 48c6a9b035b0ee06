"""The values that the chart accepts and refuses, and whether its messages can be understood."""

import importlib.util
import json
import re
from typing import Any, cast

import pytest
import yaml

from tests.helm.chart import (
    ALL_VALUES,
    CHART,
    SERVICES,
    VALUES_FILES,
    container,
    environment,
    helm_chart,
    notes,
    render,
    values_of,
    why_refused,
    workloads,
)


@pytest.mark.parametrize("name", ALL_VALUES)
def test_helm_lint_finds_nothing_in(name: str) -> None:
    found = helm_chart.lint(CHART, values_of(name), strict=True, namespace="rl")
    assert found["errors"] == []
    # Severity 1 is a hint. The only hint is that a chart may have an icon.
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"generator": {"replica": 2}}, "at '/generator': additional properties 'replica' not allowed"),
    ({"trainr": {}}, "additional properties 'trainr' not allowed"),
    ({"generator": {"replicas": "two"}}, "at '/generator/replicas': got string, want integer"),
    ({"generator": {"replicas": -1}}, "at '/generator/replicas': minimum"),
    ({"images": {"flavour": "tpu"}}, "at '/images/flavour': value must be one of 'gpu', 'cpu'"),
    ({"images": {"trainer": {"digest": "latest"}}}, "'latest' does not match pattern"),
    ({"trainer": {"shmSize": "lots"}}, "at '/trainer/shmSize': 'lots' does not match pattern"),
    ({"rewarder": {"cache": {"persistent": True}}}, "at '/rewarder/cache': additional properties 'persistent'"),
    ({"trainer": {"env": {"NCCL_DEBUG": 1}}}, "at '/trainer/env/NCCL_DEBUG': got number, want string"),
    ({"logLevel": "LOUD"}, "value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
    ({"service": {"type": "NodePort"}}, "value must be one of 'ClusterIP', 'LoadBalancer'"),
    ({"networkPolicy": {"apiFrom": [{}]}}, "at '/networkPolicy/apiFrom/0': minProperties"),
    ({"networkPolicy": {"internalRanges": ["10.0.0.1"]}}, "'10.0.0.1' does not match pattern"),
    ({"networkPolicy": {"internalRanges": ["fc00::/7"]}}, "'fc00::/7' does not match pattern"),
    (
        {"networkPolicy": {"internalRangesV6": ["::ffff:0:0/96"]}},
        "at '/networkPolicy/internalRangesV6/0': 'not' failed",
    ),
    ({"rewarder": {"endpoints": {"allowedPorts": "https"}}}, "'https' does not match pattern"),
    ({"rewarder": {"sandbox": {"seccompProfile": {"type": "Localhost"}}}}, "localhostProfile': minLength"),
    ({"metrics": {"port": 29500}}, "at '/metrics/port': maximum"),
    ({"trainer": {"multiNode": {"rendezvousPort": 8000}}}, "rendezvousPort': minimum"),
    ({"fullnameOverride": "a.b"}, "at '/fullnameOverride': 'a.b' does not match pattern"),
    ({"fullnameOverride": "9a"}, "at '/fullnameOverride': '9a' does not match pattern"),
    # An amount of bytes without a unit means that the unit was forgotten.
    ({"trainer": {"cache": {"size": "100"}}}, "at '/trainer/cache/size': '100' does not match pattern"),
    (
        {"storage": {"models": {"enabled": True, "accessMode": "ReadOnlyMany"}}},
        "storage.models.accessMode is ReadOnlyMany, and a new claim would stay empty: set storage.models.existingClaim",
    ),
    # Several pods mount these claims.
    *(
        ({"storage": {name: {"accessMode": "ReadWriteOncePod"}}}, f"at '/storage/{name}/accessMode': value must be one")
        for name in ("models", "uploads", "code")
    ),
    (
        {"storage": {"code": {"enabled": True}}, "rewarder": {"env": {"HEADRACE_REWARD_PATH": "/mine"}}},
        "rewarder.env.HEADRACE_REWARD_PATH is also set by the chart itself",
    ),
    ({"storage": {"runs": {"size": "200m"}}}, "at '/storage/runs/size': '200m' does not match pattern"),
    ({"trainer": {"resources": {"limits": {"memory": 64}}}}, "at '/trainer/resources/limits/memory': got number"),
    ({"redis": {"maxmemory": "4"}}, "at '/redis/maxmemory': '4' does not match pattern"),
    ({"redis": {"maxmemory": "0gb"}}, "at '/redis/maxmemory': '0gb' does not match pattern"),
    # Helm reports a missing key as null.
    ({"networkPolicy": {"apiFrom": None}}, "at '/networkPolicy': missing property 'apiFrom'"),
    ({"trainer": {"env": None}}, "at '/trainer': missing property 'env'"),
    (
        {"networkPolicy": {"extraEgress": {"trainer": None}}},
        "at '/networkPolicy/extraEgress': missing property 'trainer'",
    ),
    ({"metrics": None}, "missing property 'metrics'"),
    ({"logLevel": None}, "missing property 'logLevel'"),
    # Settings that contradict each other.
    ({"images": {"flavour": "cpu"}}, "trainer.gpus is 1, but images.flavour is cpu: set trainer.gpus to 0"),
    ({"generator": {"gpus": 0}}, "generator.gpus is 0, but images.flavour is gpu"),
    ({"generator": {"gpus": 4}}, "generator.gpus is 4, but generator.engineArgs makes vLLM use 1"),
    ({"generator": {"engineArgs": {"tensor_parallel_size": 2}}}, "makes vLLM use 2"),
    (
        {"generator": {"engineArgs": {"tensor-parallel-size": 1}}},
        "generator.engineArgs.tensor-parallel-size: engine arguments are written with _, as in Python: write "
        "tensor_parallel_size",
    ),
    ({"generator": {"engineArgs": {"gpu_memory_utilization": 90}}}, "gpu_memory_utilization': maximum"),
    ({"trainer": {"multiNode": {"nodes": 2}}}, "set storage.runs.accessMode to ReadWriteMany"),
    (
        {"trainer": {"multiNode": {"nodes": 2}}, "fullnameOverride": "a" * 40},
        "-trainer-node: set fullnameOverride to a",
    ),
    (
        {
            "trainer": {"multiNode": {"nodes": 2}},
            "storage": {
                "runs": {"accessMode": "ReadWriteMany"},
                "models": {"enabled": True, "accessMode": "ReadWriteOnce"},
            },
        },
        "so all nodes need the models: set storage.models.accessMode to ReadWriteMany",
    ),
    (
        {
            "trainer": {"multiNode": {"nodes": 2}},
            "storage": {
                "runs": {"accessMode": "ReadWriteMany"},
                "uploads": {"enabled": True, "existingClaim": "mine", "accessMode": "ReadWriteOnce"},
            },
        },
        "set storage.models.accessMode to ReadWriteMany, and if storage.models.existingClaim is set, to a claim with",
    ),
    (
        {"redis": {"external": {"host": "redis.data"}}},
        "redis.external.host is redis.data, but redis.bundled is true, so runs would be in the "
        "chart's own Redis: set redis.bundled to false, or leave out redis.external.host",
    ),
    ({"redis": {"bundled": False}}, "set redis.external.host to the host of your Redis"),
    ({"redis": {"bundled": False, "external": {"host": "redis.data"}}}, "the chart does not know its passwords"),
    ({"ingress": {"enabled": True}}, "name at least one host in ingress.hosts"),
    ({"gateway": {"enabled": True}}, "name at least one Gateway in gateway.parentRefs"),
    ({"images": {"pullSecrets": ["login"]}}, "at '/images/pullSecrets/0': got string, want object"),
    ({"storage": {"runs": {"emptyDir": True, "existingClaim": "mine"}}}, "storage.runs has both emptyDir and existing"),
    (
        {
            "trainer": {"multiNode": {"nodes": 2}},
            "storage": {"runs": {"emptyDir": True, "accessMode": "ReadWriteMany"}},
        },
        "with storage.runs.emptyDir each pod has its own: set it to false",
    ),
    (
        {"trainer": {"env": {"WANDB_API_KEY": "canary"}}},
        "trainer.env.WANDB_API_KEY would be readable by everyone in the pod's description: put it into a Secret and "
        "name the Secret in trainer.envFrom, or here in valueFrom.secretKeyRef",
    ),
    ({"rewarder": {"env": {"JUDGE_TOKEN": "canary"}}}, "name the Secret in rewarder.envFrom"),
    (
        {"trainer": {"env": {"HEADRACE_API_KEY": {"valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}}}},
        "set secrets.existingSecret to its name",
    ),
    ({"trainer": {"env": {"A": {"value": "canary"}}}}, "at '/trainer/env/A': "),
    (
        {"rewarder": {"rewardModules": {"configMap": "a", "existingClaim": "b"}}},
        "rewarder.rewardModules has both a configMap and an existingClaim: choose one",
    ),
    (
        {"sessions": {"toolModules": {"configMap": "a", "existingClaim": "b"}}},
        "sessions.toolModules has both a configMap and an existingClaim: choose one",
    ),
    ({"sessions": {"gpus": 1}}, "at '/sessions': additional properties 'gpus' not allowed"),
    (
        {"generator": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "generator.resources names nvidia.com/gpu: GPUs are counted in generator.gpus",
    ),
    (
        {"rewarder": {"autoscaling": {"minReplicas": 5, "maxReplicas": 2}}},
        "rewarder.autoscaling.minReplicas is 5, above maxReplicas, which is 2",
    ),
    (
        {"trainer": {"env": {"HEADRACE_API_KEY": "canary"}}},
        "by everyone in the pod's description: put it into a Secret",
    ),
    (
        {"rewarder": {"env": {"HF_TOKEN": "canary"}}},
        "rewarder.env.HF_TOKEN would be readable by everyone in the pod's description: put it into a Secret and set "
        "hub.tokenSecret to its name",
    ),
    ({"nccl": {"env": {"HUGGING_FACE_HUB_TOKEN": "canary"}}}, "set hub.tokenSecret to its name"),
    (
        {"storage": {"objectStore": {"env": {"AWS_SECRET_ACCESS_KEY": "canary"}}}},
        "storage.objectStore.env.AWS_SECRET_ACCESS_KEY would be readable by everyone in the pod's description: put a "
        "file of credentials into a Secret, set storage.objectStore.existingSecret to its name and "
        "AWS_SHARED_CREDENTIALS_FILE to the file's path",
    ),
    ({"trainer": {"env": {"AWS_SESSION_TOKEN": "canary"}}}, "set storage.objectStore.existingSecret to its name"),
    ({"rewarder": {"env": {"AWS_SESSION_TOKEN": "canary"}}}, "mount it with rewarder.extraVolumes"),
    ({"sessions": {"env": {"AWS_SESSION_TOKEN": "canary"}}}, "mount it with sessions.extraVolumes"),
    (
        {"metrics": {"port": 8000}},
        "metrics.port is 8000, which is the port of every service's HTTP API: set another port, such as 9090",
    ),
    (
        {"redis": {"maxmemory": "16gb"}},
        "redis.maxmemory is 16gb, above 85% of redis.resources.limits.memory, which is 8Gi, so Redis would be "
        "killed before it refuses a write",
    ),
    ({"redis": {"maxmemory": "6964mb"}}, "redis.maxmemory is 6964mb, above 85% of redis.resources.limits.memory"),
    ({"redis": {"maxmemory": "8g"}}, "redis.maxmemory is 8g"),
    (
        {"redis": {"persistence": {"size": "4095Mi"}}},
        "redis.persistence.size is 4095Mi, below redis.maxmemory, which is 4gb: set it to several times redis",
    ),
    (
        {"trainer": {"resources": {"requests": {"memory": "65Gi"}}}},
        "trainer.resources.requests.memory is 65Gi, above trainer.resources.limits.memory, which is 64Gi: "
        "lower the request or raise the limit",
    ),
    ({"generator": {"resources": {"limits": {"cpu": "3500m"}}}}, "generator.resources.requests.cpu is 4, above"),
    ({"rewarder": {"resources": {"limits": {"cpu": 3}}}}, "rewarder.resources.requests.cpu is 4, above"),
    ({"redis": {"resources": {"limits": {"memory": "4500M"}}}}, "redis.resources.requests.memory is 5Gi, above"),
    (
        {"trainer": {"shmSize": "0.1Ti"}},
        "trainer.shmSize is 0.1Ti, but it is a part of trainer.resources.limits.memory, which is only 64Gi",
    ),
    ({"generator": {"shmSize": "65Gi"}}, "generator.shmSize is 65Gi, but it is a part of"),
    ({"test": {"run": {"weight_transport": "ipc"}}}, "test.run.weight_transport is ipc, which needs the trainer and"),
    ({"trainer": {"env": {"HEADRACE_PORT": "9"}}}, "trainer.env.HEADRACE_PORT is also set by the chart itself"),
    ({"nccl": {"env": {"NCCL_DEBUG": "INFO"}}}, "nccl.env.NCCL_DEBUG is also set by the chart itself"),
    (
        {"trainer": {"env": {"NCCL_IB_HCA": "mlx4"}}, "nccl": {"env": {"NCCL_IB_HCA": "mlx5"}}},
        "trainer.env.NCCL_IB_HCA is also set by nccl.env",
    ),
]


@pytest.mark.parametrize(
    "host", ["rediss://r.example.com:6380", "r.example.com:6380", "user:pw@r.example.com", "r.example.com/0", "fd00::1"]
)
def test_where_a_redis_is_takes_a_name_or_an_address_and_nothing_else(host: str) -> None:
    said = why_refused({"redis": {"bundled": False, "external": {"host": host}}})
    assert f"at '/redis/external/host': '{host}' does not match pattern" in said


@pytest.mark.parametrize("cidr", ["999.1.2.3/99", "10.0.0.0/33", "256.0.0.1/32", "10.0.0/8", "10/8", "fc00::/129"])
def test_a_network_that_cannot_be_is_refused(cidr: str) -> None:
    assert f"'{cidr}' does not match pattern" in why_refused({"redis": {"external": {"cidr": cidr}}})
    assert f"'{cidr}' does not match pattern" in why_refused({"networkPolicy": {"internalRanges": [cidr]}})


@pytest.mark.parametrize("registry", ["https://registry.example.com/team", "me:pw@registry.example.com", "a.b:latest"])
def test_a_registry_that_no_image_can_be_pulled_from_is_refused(registry: str) -> None:
    assert f"at '/images/registry': '{registry}' does not match" in why_refused({"images": {"registry": registry}})


REPLACEABLE = {"HF_HOME", "HEADRACE_LOG_LEVEL"}
ROOTS = {"HEADRACE_DATA_ROOTS", "HEADRACE_WEIGHT_ROOTS"}


@pytest.mark.parametrize(("values", "sentence"), REFUSED)
def test_values_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], sentence: str) -> None:
    said = why_refused(values)
    assert sentence in said
    assert "canary" not in said


@pytest.mark.parametrize("service", SERVICES)
def test_where_the_hub_is_kept_and_what_is_logged_can_be_said_for_one_service(service: str) -> None:
    for other in SERVICES:
        variables = container(workloads(render({service: {"env": dict.fromkeys(REPLACEABLE, "canary")}}))[other])["env"]
        found = [entry["value"] for entry in variables if entry["name"] in REPLACEABLE]
        assert found == (["canary"] * 2 if other == service else ["/cache/huggingface", "INFO"])


@pytest.mark.parametrize("service", SERVICES)
def test_the_roots_of_a_service_that_mounts_more_are_named_once(service: str) -> None:
    variables = container(workloads(render({service: {"env": dict.fromkeys(ROOTS, "/more")}}))[service])["env"]
    assert [entry["value"] for entry in variables if entry["name"] in ROOTS] == ["/more"] * 2


@pytest.mark.parametrize("service", SERVICES)
def test_no_variable_of_the_charts_own_can_be_set_a_second_time(service: str) -> None:
    own = {entry["name"] for entry in container(workloads(render())[service])["env"]}
    said = why_refused({service: {"env": dict.fromkeys(own, "canary")}})
    refused = {name for name in own if f"- {service}.env.{name} is also set by the chart itself" in said}
    assert refused == own - REPLACEABLE - ROOTS - {"HEADRACE_REDIS_URL"}, "which is refused as a secret"
    assert f"- {service}.env.HEADRACE_REDIS_URL would be readable by everyone in the pod's description" in said
    assert "canary" not in said


def test_all_contradictions_are_reported_at_once_and_each_only_once() -> None:
    said = why_refused(
        {"images": {"flavour": "cpu"}, "metrics": {"port": 8000}, "nccl": {"env": {"NCCL_DEBUG": "INFO"}}}
    )
    place, *problems = said.splitlines()
    assert "validate.yaml" in place, "and no other template, in which nothing is wrong"
    assert place.endswith("these values cannot work:")
    assert [problem.split(" ")[:2] for problem in problems] == [
        ["-", "trainer.gpus"],
        ["-", "generator.gpus"],
        ["-", "metrics.port"],
        ["-", "nccl.env.NCCL_DEBUG"],
    ]


@pytest.mark.parametrize("release", ["9a", "team.rl"])
def test_a_release_whose_name_no_service_can_have_is_refused_and_may_have_another(release: str) -> None:
    assert f"the names of all Services would begin with {release}-headrace" in why_refused({}, release=release)
    assert render({"fullnameOverride": "rl"}, release=release)


@pytest.mark.parametrize(
    "values",
    [
        {"redis": {"maxmemory": "6gb"}},
        {"redis": {"maxmemory": "6963mb"}},  # of 8Gi, of which 85% are 6963.2Mi
        {"redis": {"maxmemory": "7g"}},  # 7e9 bytes
        {"redis": {"persistence": {"size": "4Gi"}}},
        {"redis": {"persistence": {"size": "1Gi", "existingClaim": "mine"}}},
        {"redis": {"external": {"cidr": "255.255.255.255/32"}}},
        {"redis": {"external": {"cidr": "fd00:1::/64"}}},
        {"networkPolicy": {"internalRanges": ["10.20.0.0/16", "192.168.199.249/32"]}},
        {"images": {"registry": "registry.example.com:5000/team/"}},
        {"images": {"registry": "localhost:5000"}},
        {"generator": {"engineArgs": {"gpu_memory_utilization": 1, "compilation_config": {"cudagraph-mode": "NONE"}}}},
        {"redis": {"maxmemory": "16gb", "resources": {"limits": None}}},
        {"trainer": {"shmSize": "64Gi", "resources": {"requests": {"memory": "65536Mi"}}}},
        {"trainer": {"resources": {"requests": None, "limits": None}}},
        {"generator": {"resources": {"limits": {"cpu": 4, "memory": "68719476k"}}}},
        {"trainer": {"env": {"HF_HUB_OFFLINE": "1"}}},  # which the chart sets only if the hub is disabled
    ],
)
def test_values_at_the_edge_of_what_works_are_taken(values: dict[str, Any]) -> None:
    assert render(values)


@pytest.mark.parametrize("host", ["redis", "r_1.example.com.", "10.1.2.3", "[fd00::1]"])
def test_a_redis_elsewhere_may_have_any_name_or_address(host: str) -> None:
    values = {"secrets": {"existingSecret": "mine"}, "redis": {"bundled": False, "external": {"host": host}}}
    variables = environment(workloads(render(values))["trainer"], pod="p")
    assert variables["HEADRACE_REDIS_URL"] == f"rediss://trainer@{host}:6379/0"


def test_no_key_of_ours_can_be_taken_away_by_null() -> None:
    """Helm removes a key that is set to null from the values, and templates need all of them."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def optional(rules: dict[str, Any], values: dict[str, Any], path: str) -> list[str]:
        rules = schema["definitions"]["budget"] if rules.get("$ref") == "#/definitions/budget" else rules
        if rules.get("additionalProperties") is not False:
            return []
        found = [f"{path}.{key}" for key in values if key not in rules.get("required", [])]
        for key, inner in rules["properties"].items():
            if isinstance(values.get(key), dict):
                found += optional(inner, values[key], f"{path}.{key}")
        return found

    assert optional(schema, defaults, "") == []


def test_every_value_has_a_default_and_every_default_a_rule() -> None:
    """The schema refuses unknown keys in the defaults. It remains to check that each of its keys is in values.yaml."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(rules: dict[str, Any], values: Any, path: str) -> list[str]:
        if "$ref" in rules or rules.get("additionalProperties") is not False or path == ".affinity":
            return []
        found: list[str] = []
        for key, inner in rules["properties"].items():
            if key == "global" or path.endswith("affinity"):
                continue
            if not isinstance(values, dict) or key not in values:
                found.append(f"{path}.{key}")
            else:
                found += missing(inner, values[key], f"{path}.{key}")
        return found

    assert missing(schema, defaults, "") == []


def test_every_object_of_the_schema_with_keys_of_ours_refuses_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def open_ones(node: object, path: str) -> list[str]:
        if isinstance(node, list):
            items = cast("list[object]", node)
            return [found for index, inner in enumerate(items) for found in open_ones(inner, f"{path}/{index}")]
        if not isinstance(node, dict):
            return []
        table = cast("dict[str, Any]", node)
        own = (
            [path]
            if table.get("type") == "object" and "properties" in node and "additionalProperties" not in node
            else []
        )
        return own + [found for key, inner in table.items() for found in open_ones(inner, f"{path}/{key}")]

    assert open_ones(schema, "") == []


def test_the_chart_can_be_a_part_of_another() -> None:
    assert render({"global": {"storageClass": "fast"}})


@pytest.mark.parametrize("name", VALUES_FILES)
def test_the_notes_say_how_to_get_the_key_and_never_what_it_is(name: str) -> None:
    said = notes(values_of(name))
    assert "kubectl -n rl get secret headrace-keys -o jsonpath='{.data.api-key}'" in said
    assert "helm test headrace -n rl" in said


@pytest.mark.parametrize("timeout_s", [900, 3000])
def test_helm_waits_for_the_pod_of_its_test_and_not_only_five_minutes(timeout_s: int) -> None:
    values = {"test": {"timeoutSeconds": timeout_s}}
    (waits_s,) = re.findall(r"helm test headrace -n rl --logs --timeout (\d+)s", notes(values))
    assert int(waits_s) > workloads(render(values))["test"]["spec"]["activeDeadlineSeconds"]


def test_the_documents_call_helm_test_as_the_notes_do() -> None:
    (command,) = re.findall(r"helm test .*", notes())
    for page in (CHART / "README.md", CHART.parent.parent.parent / "docs" / "kubernetes.md"):
        assert set(re.findall(r"helm test headrace[^`\n]*", page.read_text(encoding="utf-8"))) == {command}


def test_the_notes_warn_of_what_is_left_open() -> None:
    registry = {"images": {"registry": "registry.example.com"}}
    ingress: dict[str, Any] = {"ingress": {"enabled": True, "hosts": ["rl.example.com"]}, **registry}
    opened = {"networkPolicy": {"apiFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}}
    assert "WARNING" not in notes(registry)
    assert "WARNING: networkPolicy.enabled is false" in notes({"networkPolicy": {"enabled": False}})
    assert "WARNING: images.registry is empty" in notes()
    assert "WARNING" not in notes({"images": {"pullPolicy": "Never"}}), "they are on the nodes"
    assert "WARNING: networkPolicy.apiFrom names only pods of the namespace rl" in notes(ingress)
    assert "WARNING: ingress.tlsSecret is empty" in notes(ingress)
    assert "WARNING" not in notes({**ingress, **opened, "ingress": {**ingress["ingress"], "tlsSecret": "tls"}})
    gateway = {"gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}, **registry}
    assert "WARNING: networkPolicy.apiFrom names only pods" in notes(gateway)
    assert "WARNING" not in notes({**gateway, **opened})
    assert "WARNING" not in notes({**gateway, "networkPolicy": {"apiFrom": [{"namespaceSelector": {}}]}}), "all of them"
    lost = {**registry, "storage": {"runs": {"emptyDir": True}}, "redis": {"persistence": {"emptyDir": True}}}
    assert "WARNING: storage.runs and redis.persistence have emptyDir: true" in notes(lost)


@pytest.mark.parametrize("name", ["values.yaml", *VALUES_FILES])
def test_helm_reads_a_values_file_as_the_tests_do(name: str) -> None:
    text = (CHART / name).read_text()
    assert helm_chart.values_from_yaml(text) == yaml.safe_load(text)


def test_the_readme_of_the_chart_has_every_value_with_its_default_and_its_comment() -> None:
    path = CHART.parent / "make_readme.py"
    spec = importlib.util.spec_from_file_location("make_readme", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (CHART / "README.md").read_text()
    assert written == module.readme((CHART / "values.yaml").read_text()), f"run python {path}"
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {key.partition(".")[0] for key, _, _ in module.rows((CHART / "values.yaml").read_text())} == set(defaults)
