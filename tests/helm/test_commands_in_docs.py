"""Every object and service that commands in docs/operations.md name exists in the chart or the compose file."""

import re
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, RELEASE, Object, of_kind, render

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate, and the pod in docs/operations.md is validated"
)

ROOT = CHART.parent.parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
WITH_CODE = {"storage": {"code": {"enabled": True}}}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())


def section(heading: str) -> str:
    return PAGE.partition(f"### {heading}\n")[2].partition("\n### ")[0]


def test_every_object_of_the_release_that_a_command_names_is_made_by_the_chart() -> None:
    objects = render()
    sets = of_kind(objects, "StatefulSet")
    known = {it["metadata"]["name"] for it in objects} | {f"{RELEASE}-{name}-0" for name in sets}
    kinds = {(it["kind"].lower(), it["metadata"]["name"]) for it in objects}
    commands = [line for line in COMMANDS if "kubectl" in line]
    named = {name for line in commands for name in re.findall(r"\bheadrace-[\w-]+", line)}
    assert len(named) > 5
    assert named <= known
    of_a_kind = {it for line in commands for it in re.findall(r"\b(statefulset|deployment)/([\w-]+)", line)}
    assert of_a_kind
    assert of_a_kind <= kinds
    (deleted,) = [line for line in commands if "delete pod -l" in line]
    components = set(re.findall(r"[\w-]+", deleted.partition(" in (")[2]))
    assert components <= {"trainer-node", *sets}


def test_every_key_of_the_secret_that_a_command_changes_is_one() -> None:
    (secret,) = of_kind(render(), "Secret").values()
    (line,) = [line for line in COMMANDS if "patch secret" in line]
    assert secret["metadata"]["name"] in line
    changed = re.findall(r'"stringData": \{"([\w-]+)"', line)
    assert changed
    assert set(changed) <= secret["data"].keys()
    used = set(re.findall(r"redis-password-\w+", "".join(COMMANDS)))
    assert used <= secret["data"].keys()
    assert used <= COMPOSE["secrets"].keys()


def test_the_way_back_with_helm_keeps_the_keys_that_the_cluster_has() -> None:
    """A rollback restores the Secret of an earlier revision, with the keys from before a rotation."""
    text = " ".join(section("Upgrading with Helm").split())
    (way_back,) = re.findall(r"To go back,?:? [^:]*: `(.*?)`", text)
    assert way_back.startswith("helm upgrade headrace ")
    assert "lookup" in (CHART / "templates" / "secret.yaml").read_text()


def test_every_service_that_a_command_of_compose_names_is_in_the_file() -> None:
    text = "\n".join(COMMANDS)
    stopped = re.findall(r"docker compose (?:stop|up -d --force-recreate) ([\w -]+?)(?: +#|\n|$)", text)
    entered = re.findall(r"docker compose (?:exec(?: -T)?|run --rm -T --no-deps --entrypoint tar) ([\w-]+)", text)
    named = {service for names in (*stopped, *entered) for service in names.split()}
    assert named == {"trainer", "redis", "generator"}
    assert named <= COMPOSE["services"].keys()
    assert {"trainer-single", "trainer-cpu", "generator-single", "generator-cpu"} <= COMPOSE["services"].keys()
    (removed,) = re.findall(r"docker volume rm ([\w ]+)`", PAGE)
    assert set(removed.split()) <= {f"{COMPOSE['name']}_{volume}" for volume in COMPOSE["volumes"]}


def test_the_way_back_with_compose_builds_nothing() -> None:
    """A build in the new release's directory would replace the images of the old one by new code."""
    (way_back,) = [line for line in section("Upgrading with Compose").split("\n\n") if line.startswith("To go back")]
    text = " ".join(way_back.split())
    assert "in `deploy/` of the old release" in text
    assert "without `docker compose build`" in text


def test_what_users_put_beside_the_compose_file_is_taken_along_copied_and_restored() -> None:
    text = (ROOT / "deploy" / "docker-compose.yml").read_text()
    of_users = {*re.findall(r":-\./([\w-]+)\}", text), ".env", "docker-compose.override.yml"}
    assert of_users > {"secrets", "rewards", "tools", "api-keys", "tls"}
    upgrade, backup = section("Upgrading with Compose"), section("Backup with Compose")
    assert of_users <= set(re.findall(r"`([\w.-]+)/?`", upgrade))
    copied, restored = backup.split("To restore,")
    assert of_users <= set(re.findall(r"[\w.-]+", copied))
    assert of_users <= set(re.findall(r"BACKUP/([\w.-]+)", restored))
    for volume in ("runs", "code"):
        assert f"trainer tar -C /{volume} -cf - . >BACKUP/{volume}.tar" in copied
        assert f"trainer -C /{volume} -xf - <BACKUP/{volume}.tar" in restored


def test_what_helm_copies_is_restored_to_the_claims_that_the_installation_is_given() -> None:
    copied, restored = section("Backup with Helm").split("To restore,")
    claims = set(re.findall(r"\b([\w.]+\.existingClaim)=(\w+)-restored", restored))
    assert {value for value, _ in claims} == set(re.findall(r"`([\w.]+\.existingClaim)`", copied))
    volumes = {volume for _, volume in claims}
    assert volumes == {"runs", "redis", "code"}
    for volume in volumes:
        assert f">BACKUP/{volume}.tar" in copied
        assert f"<BACKUP/{volume}.tar" in restored
        assert f"claimName: {volume}-restored" in restored


@pytest.mark.parametrize("where", ["docker compose exec", "kubectl"])
def test_copied_files_are_the_files_that_commands_copy(where: str) -> None:
    text = "\n".join(line for line in COMMANDS if where in line)
    assert re.search(r"trainer\S*( --)? tar -C /runs (--exclude=\S+ )?-cf", text)
    assert re.search(r"redis\S*( --)? tar -C /data -cf - appendonlydir", text)


def test_copied_files_are_where_the_services_keep_them() -> None:
    objects: list[Object] = render(WITH_CODE)
    places = (("trainer", "/runs", "runs"), ("trainer", "/code", "code"), ("redis", "/data", "redis"))
    for workload, path, claim in places:
        spec = of_kind(objects, "StatefulSet")[workload]["spec"]["template"]["spec"]
        (mount,) = [it for it in spec["containers"][0]["volumeMounts"] if it["mountPath"] == path]
        (volume,) = [it for it in spec["volumes"] if it["name"] == mount["name"]]
        assert volume["persistentVolumeClaim"]["claimName"] == f"{RELEASE}-{claim}"
        assert any(it.endswith(f":{path}") for it in COMPOSE["services"][workload]["volumes"])


def test_the_pod_that_fills_claims_is_valid_and_started_as_the_services_are() -> None:
    objects = [it for language, block in BLOCKS if language == "yaml" for it in yaml.safe_load_all(block)]
    (pod,) = [it for it in objects if it.get("kind") == "Pod"]
    kubernetes_validate.validate(pod, "1.30", strict=True)
    ours = of_kind(render(), "StatefulSet")["redis"]["spec"]["template"]["spec"]
    theirs = pod["spec"]["securityContext"]
    assert theirs == {key: ours["securityContext"][key] for key in theirs}
    assert pod["spec"]["containers"][0]["image"] == ours["containers"][0]["image"]
    claims = {it["spec"]["source"]["persistentVolumeClaimName"] for it in objects if it.get("kind") == "VolumeSnapshot"}
    assert claims <= {f"{RELEASE}-{name}" for name in of_kind(render(WITH_CODE), "PersistentVolumeClaim")}
    assert len(claims) == 3


def test_every_value_that_a_command_sets_is_a_key() -> None:
    defaults: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    named = {path for line in COMMANDS for path in re.findall(r"--set ([\w.]+)=", line)}
    assert named
    for path in named:
        inside = defaults
        for key in path.split("."):
            inside = inside[key]
