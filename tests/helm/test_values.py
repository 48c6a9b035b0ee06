"""What the chart takes and what it refuses, and whether a person understands why."""

import json
from typing import Any, cast

import pytest
import yaml

from tests.helm.chart import ALL_VALUES, CHART, VALUES_FILES, helm_chart, notes, render, values_of, why_refused


@pytest.mark.parametrize("name", ALL_VALUES)
def test_helm_lint_finds_nothing_in(name: str) -> None:
    found = helm_chart.lint(CHART, values_of(name), strict=True, namespace="rl")
    assert found["errors"] == []
    # Severity 1 is a hint; the only one is that a chart may have an icon.
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
    # What contradicts something else.
    ({"images": {"flavour": "cpu"}}, "trainer.gpus is 1, but images.flavour is cpu: set trainer.gpus to 0"),
    ({"generator": {"gpus": 0}}, "generator.gpus is 0, but images.flavour is gpu"),
    ({"generator": {"gpus": 4}}, "generator.gpus is 4, but generator.engineArgs makes vLLM use 1"),
    ({"generator": {"engineArgs": {"tensor_parallel_size": 2}}}, "makes vLLM use 2"),
    ({"trainer": {"multiNode": {"nodes": 2}}}, "set storage.runs.accessMode to ReadWriteMany"),
    (
        {
            "trainer": {"multiNode": {"nodes": 2}},
            "storage": {
                "runs": {"accessMode": "ReadWriteMany"},
                "models": {"enabled": True, "accessMode": "ReadWriteOnce"},
            },
        },
        "all of them need the models: set storage.models.accessMode to ReadWriteMany",
    ),
    ({"redis": {"bundled": False}}, "say where your Redis is in redis.external.host"),
    ({"redis": {"bundled": False, "external": {"host": "redis.data"}}}, "its passwords are yours"),
    ({"ingress": {"enabled": True}}, "name at least one host in ingress.hosts"),
    ({"rewarder": {"rewardModules": {"configMap": "a", "existingClaim": "b"}}}, "name one"),
    (
        {"generator": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "generator.resources names nvidia.com/gpu: GPUs are counted in generator.gpus",
    ),
    (
        {"rewarder": {"autoscaling": {"minReplicas": 5, "maxReplicas": 2}}},
        "rewarder.autoscaling.minReplicas is 5, above maxReplicas, which is 2",
    ),
    ({"trainer": {"env": {"HEADRACE_API_KEY": "canary"}}}, "for all to read: put it into a Secret"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED)
def test_values_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], sentence: str) -> None:
    said = why_refused(values)
    assert sentence in said
    assert "canary" not in said


def test_every_value_has_a_default_and_every_default_a_rule() -> None:
    """The schema refuses defaults it does not know, so what is left is that each of its keys stands in values.yaml."""
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


def test_the_notes_warn_of_what_is_left_open() -> None:
    assert "WARNING: networkPolicy.enabled is false" in notes({"networkPolicy": {"enabled": False}})
    assert "WARNING" not in notes()


@pytest.mark.parametrize("name", ["values.yaml", *VALUES_FILES])
def test_helm_reads_a_values_file_as_the_tests_do(name: str) -> None:
    text = (CHART / name).read_text()
    assert helm_chart.values_from_yaml(text) == yaml.safe_load(text)
