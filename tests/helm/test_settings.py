"""The variables that the chart sets are the ones that the services read: each is a setting, and all are accepted."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.cli.command_line import make_parser
from headrace.doctor.targets import Targets, find_targets
from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import connect
from tests.helm.chart import (
    ALL_VALUES,
    CHART,
    NAMESPACE,
    SERVICES,
    container,
    environment,
    mounts,
    of_kind,
    render,
    values_of,
    workloads,
)
from tests.helm.inside import PODS, SETTINGS, inside


def with_settings(name: str) -> list[str]:
    """Return the workloads of a values file that read settings."""
    has_more_machines = "multiNode" in values_of(name).get("trainer", {})
    return [workload for workload in SETTINGS if workload != "trainer-node" or has_more_machines]


@pytest.mark.parametrize(("name", "workload"), [(name, it) for name in ALL_VALUES for it in with_settings(name)])
def test_every_variable_is_a_setting_and_all_together_are_accepted(
    name: str, workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(values_of(name))
    it = inside(objects, workload, tmp_path)
    assert with_settings(name) == [one for one in SETTINGS if one in workloads(objects)]
    ours = {variable for variable in it.variables if variable.startswith("HEADRACE_")}
    known = {f"HEADRACE_{field.upper()}" for field in SETTINGS[workload].model_fields}
    assert ours <= known, f"no service reads {ours - known}"

    settings = it.settings(SETTINGS[workload], monkeypatch)

    assert settings.api_key.get_secret_value() == "content-of-api-key"
    assert settings.internal_key.get_secret_value() == ("" if workload == "rewarder" else "content-of-internal-key")
    assert (settings.host, settings.port, settings.metrics_port) == ("0.0.0.0", 8000, 9090)
    assert settings.replica_id == PODS[workload]
    if workload in SERVICES:
        url = urlsplit(str(settings.redis_url.get_secret_value()))
        assert (url.username, url.password) == (workload, f"content-of-redis-password-{workload}")


def test_paths_of_variables_are_paths_of_mounts() -> None:
    for workload, it in workloads(render(values_of("everything"))).items():
        if workload in SETTINGS:
            paths = {
                path for name, text in environment(it, pod="p").items() for path in text.split(":")
                if text.startswith("/") and name.startswith(("HEADRACE_", "HOME", "HF_"))
                and not name.endswith("_ROOTS")
            }  # fmt: skip
            mounted = mounts(it).keys()
            assert paths
            assert all(any(path == top or path.startswith(f"{top}/") for top in mounted) for path in paths), paths


def test_runs_may_name_what_is_mounted_for_them_and_nothing_else() -> None:
    everything = workloads(render(values_of("everything")))
    for workload in SERVICES:
        variables = environment(everything[workload], pod="p")
        assert variables["HEADRACE_DATA_ROOTS"] == "/models", workload
        assert variables.get("HEADRACE_WEIGHT_ROOTS", "/weights").split(":")[0] == "/weights", workload
    trainer = workloads(render(values_of("values-kind.yaml")))["trainer"]
    assert environment(trainer, pod="p")["HEADRACE_WEIGHT_ROOTS"] == "/weights", "no bucket without credentials"


def test_uploads_are_off_unless_they_have_a_claim_which_only_the_trainer_writes() -> None:
    without = workloads(render({}))
    assert all("HEADRACE_UPLOADS_DIR" not in environment(without[name], pod="p") for name in SERVICES)
    values = {"storage": {"uploads": {"enabled": True}}}
    objects = render(values)
    found = workloads(objects)
    assert "uploads" in of_kind(objects, "PersistentVolumeClaim")
    assert environment(found["trainer"], pod="p")["HEADRACE_UPLOADS_DIR"] == "/uploads"
    for name in ("trainer", "generator"):
        assert environment(found[name], pod="p")["HEADRACE_DATA_ROOTS"] == "/models:/uploads"
        assert mounts(found[name])["/uploads"].get("readOnly", False) is (name != "trainer")


def test_code_of_clients_is_off_unless_it_has_a_claim_which_only_the_trainer_writes() -> None:
    without = workloads(render({}))
    for name in SERVICES:
        variables = environment(without[name], pod="p")
        assert not {"HEADRACE_CODE_UPLOADS_DIR", "HEADRACE_REWARD_PATH", "HEADRACE_TOOL_PATH"} & variables.keys()
        assert "/code" not in mounts(without[name])
    storage = {"code": {"enabled": True}, "runs": {"accessMode": "ReadWriteMany"}}
    objects = render({"storage": storage, "trainer": {"multiNode": {"nodes": 2}}})
    found = workloads(objects)
    assert "code" in of_kind(objects, "PersistentVolumeClaim")
    of_service = {name: environment(found[name], pod="p") for name in SETTINGS}
    assert of_service["trainer"]["HEADRACE_CODE_UPLOADS_DIR"] == "/code"
    assert of_service["rewarder"]["HEADRACE_REWARD_PATH"] == "/rewards:/code"
    assert of_service["sessions"]["HEADRACE_TOOL_PATH"] == "/tools:/code"
    there = {name: mounts(it)["/code"] for name, it in found.items() if "/code" in mounts(it)}
    read_only = {name: mount.get("readOnly", False) for name, mount in there.items()}
    assert read_only == {"trainer": False, "rewarder": True, "sessions": True}


def test_the_trainer_gets_the_addresses_of_all_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(values_of("values-multi-node-70b.yaml"))
    settings = inside(objects, "trainer", tmp_path).settings(TrainerSettings, monkeypatch)
    services = of_kind(objects, "Service")
    assert settings.rewarder_url == f"http://{services['rewarder']['metadata']['name']}:8000"
    assert settings.sessions_url == f"http://{services['sessions']['metadata']['name']}:8000"
    assert settings.push_address == "10.1.2.3", "the pod's own"
    first = f"headrace-trainer-0.{services['trainer-nodes']['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
    assert settings.rendezvous_endpoint == "10.1.2.3:29500", "its name may still lead to the pod before it"
    node = inside(objects, "trainer-node", tmp_path).settings(TrainerSettings, monkeypatch)
    assert node.rendezvous_endpoint == f"{first}:29500", "its address changes"
    assert (settings.collective_timeout_s, settings.rank_stop_grace_s) == (1800, 300)


def test_machines_with_ranks_meet_where_the_trainer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(values_of("values-multi-node-70b.yaml"))
    at_trainer = inside(objects, "trainer", tmp_path).variables["HEADRACE_RENDEZVOUS_ENDPOINT"]
    node = inside(objects, "trainer-node", tmp_path)
    at_node = node.variables["HEADRACE_RENDEZVOUS_ENDPOINT"]
    assert at_node.rpartition(":")[2] == at_trainer.rpartition(":")[2], "one port"
    assert not any("REDIS" in name for name in node.variables), "they need no credentials"
    assert node.settings(TrainerSettings, monkeypatch).runs_dir == tmp_path / "runs"


def test_the_program_of_a_machine_with_ranks_understands_its_arguments() -> None:
    command = container(workloads(render(values_of("everything")))["trainer-node"])["command"]
    arguments = [part.replace("$(HEADRACE_REPLICA_ID)", "headrace-trainer-node-2") for part in command[1:]]
    # No variable is set, so the program comes to the point where it reports what is missing.
    done = subprocess.run([sys.executable, *arguments], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "HEADRACE_RENDEZVOUS_ENDPOINT is not set" in done.stderr


def test_the_probes_are_programs_that_exist() -> None:
    probe = container(workloads(render())["generator"])["readinessProbe"]["exec"]["command"]
    command = [sys.executable, *probe[1:]]
    environment_of_probe = {"HEADRACE_PORT": "1"}
    done = subprocess.run(command, env=environment_of_probe, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused" in done.stdout


def test_a_generator_gives_its_name_in_the_headless_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(values_of("values-multi-node-70b.yaml"))
    settings = inside(objects, "generator", tmp_path).settings(GeneratorSettings, monkeypatch)
    service = of_kind(objects, "Service")["generators"]["metadata"]["name"]
    assert settings.advertise_url == f"http://headrace-generator-0.{service}.{NAMESPACE}.svc.cluster.local:8000"
    assert settings.engine_args == {"tensor_parallel_size": 8, "gpu_memory_utilization": 0.9}


def test_a_rewarder_gets_the_settings_of_modules_and_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = inside(render(values_of("everything")), "rewarder", tmp_path).settings(RewarderSettings, monkeypatch)
    assert settings.reward_path == (tmp_path / "etc/headrace/rewards", tmp_path / "code")
    assert settings.reward_secrets_dir == tmp_path / "run/secrets/headrace-endpoints"
    assert settings.reward_allowed_hosts == "judge.ml:8000"
    assert settings.drain_s == 30
    assert settings.num_reward_workers == 4


def test_sessions_get_the_settings_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = inside(render(values_of("everything")), "sessions", tmp_path).settings(SessionsSettings, monkeypatch)
    assert settings.tool_path == (tmp_path / "etc/headrace/tools", tmp_path / "code")
    assert settings.num_tool_workers == 4
    assert settings.name == PODS["sessions"], "no generator has it"


def test_certificates_for_endpoints_are_read_from_their_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = inside(render({"rewarder": {"endpoints": {"caConfigMap": "ca"}}}), "rewarder", tmp_path)
    import certifi

    shutil.copy(certifi.where(), it.variables["HEADRACE_REWARD_CA_FILE"])
    assert it.settings(RewarderSettings, monkeypatch).reward_ca_file == tmp_path / "etc/headrace/endpoint-ca/ca.crt"


@pytest.mark.parametrize(
    ("external", "url"),
    [
        ({}, "rediss://trainer:PW@redis.data:6379/0"),
        ({"tls": {"enabled": False}}, "redis://trainer:PW@redis.data:6379/0"),
        ({"port": 6380, "database": 3}, "rediss://trainer:PW@redis.data:6380/3"),
        ({"users": {"trainer": ""}}, "rediss://:PW@redis.data:6379/0"),
        (
            {"tls": {"caConfigMap": "ca"}},
            "rediss://trainer:PW@redis.data:6379/0?ssl_ca_certs=/etc/headrace/redis-ca/ca.crt",
        ),
    ],
)
def test_a_redis_elsewhere_is_reached_with_tls_and_a_user_if_the_values_say_so(
    external: dict[str, Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "secrets": {"existingSecret": "mine"},
        "redis": {"bundled": False, "external": {"host": "redis.data"} | external},
    }
    objects = render(values)
    settings = inside(objects, "trainer", tmp_path).settings(TrainerSettings, monkeypatch)
    found = settings.redis_url.get_secret_value()
    assert found.replace("content-of-redis-password-trainer", "PW") == url
    options = connect(found).connection_pool.connection_kwargs
    assert options.get("ssl_ca_certs") == ("/etc/headrace/redis-ca/ca.crt" if "ca_certs" in url else None)
    if "ca_certs" in url:
        assert "/etc/headrace/redis-ca" in mounts(workloads(objects)["generator"])


def test_headrace_doctor_finds_all_services_where_the_page_runs_it(tmp_path: Path) -> None:
    page = (CHART.parent.parent.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (pod,) = re.findall(r"^tar -cf - headrace \| kubectl -n rl exec -i (\S+) -- tar -C /tmp -xf -", page, re.M)
    ((where, words),) = re.findall(
        r"exec (\S+) -- env PYTHONPATH=/app:/tmp python3 -m headrace (doctor .*)$", page, re.M
    )
    objects = render()
    assert pod == where == PODS["trainer"]
    assert "/tmp" in mounts(workloads(objects)["trainer"])
    environment = inside(objects, "trainer", tmp_path).variables
    targets = find_targets(make_parser().parse_args(words.split()), environment)
    assert targets == Targets(
        api_url=f"http://127.0.0.1:{environment['HEADRACE_PORT']}",
        rewarder_urls=("http://headrace-rewarder:8000",),
        sessions_urls=("http://headrace-sessions:8000",),
        redis_url="redis://trainer:content-of-redis-password-trainer@headrace-redis:6379/0",
        api_key="content-of-api-key",
        internal_key="content-of-internal-key",
        api_key_source=f"HEADRACE_API_KEY_FILE ({environment['HEADRACE_API_KEY_FILE']})",
        internal_key_source=f"HEADRACE_INTERNAL_KEY_FILE ({environment['HEADRACE_INTERNAL_KEY_FILE']})",
    )


def test_named_keys_and_a_certificate_are_read_from_directories_that_kubernetes_renews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is mounted with subPath would not change."""
    objects = render({"secrets": {"apiKeysSecret": "named-keys"}, "tls": {"secretName": "certificate"}})
    for workload in SERVICES:
        settings = inside(objects, workload, tmp_path / workload).settings(SETTINGS[workload], monkeypatch)
        secrets = tmp_path / workload / "run/secrets"
        assert settings.api_keys_file == secrets / "headrace-api-keys/api-keys"
        assert settings.tls_cert_file == secrets / "headrace-tls/tls.crt"
        assert settings.tls_key_file == secrets / "headrace-tls/tls.key"
        assert settings.tls_ca_file == secrets / "headrace-tls/ca.crt"
        it = container(workloads(objects)[workload])
        assert it["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
        assert not any("subPath" in mount for mount in it["volumeMounts"])
    trainer = inside(objects, "trainer", tmp_path).settings(TrainerSettings, monkeypatch)
    generator = inside(objects, "generator", tmp_path).settings(GeneratorSettings, monkeypatch)
    assert trainer.rewarder_url == "https://headrace-rewarder:8000"
    assert trainer.sessions_url == "https://headrace-sessions:8000"
    assert generator.advertise_url.startswith("https://headrace-generator-0.")
    assert not [mount for mount in mounts(workloads(render())["trainer"]) if "tls" in mount or "api-keys" in mount]


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({"tls": {"secretName": "certificate"}}, "https://127.0.0.1:8000"),
        (
            {"tls": {"secretName": "certificate"}, "sessions": {"env": {"HEADRACE_ADVERTISE_URL": "https://pod:8000"}}},
            "https://pod:8000",
        ),
        ({}, ""),
    ],
)
def test_agent_functions_call_their_session_by_an_address_that_the_certificate_names(
    values: dict[str, Any], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the pod of the sessions service, whose name changes and is in no certificate."""
    assert inside(render(values), "sessions", tmp_path).settings(SessionsSettings, monkeypatch).advertise_url == url


def test_a_service_that_only_calls_others_over_tls_has_the_ca_and_no_key(tmp_path: Path) -> None:
    values = values_of("everything")
    objects = render(values)
    node = workloads(objects)["trainer-node"]
    variables = inside(objects, "trainer-node", tmp_path).variables
    assert "HEADRACE_TLS_CERT_FILE" not in variables
    assert "HEADRACE_API_KEYS_FILE" not in variables
    command = container(node)["command"]
    assert command[command.index("--api") + 1] == "https://headrace-trainer:8000"
    (test,) = [it for it in objects if it["kind"] == "Pod"]
    for spec in (node["spec"]["template"]["spec"], test["spec"]):
        (tls,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "tls"]
        assert [item["key"] for item in tls["items"]] == ["ca.crt"]
    (it,) = test["spec"]["containers"]
    assert {"name": "HEADRACE_TLS_CA_FILE", "value": "/run/secrets/headrace-tls/ca.crt"} in it["env"]
    assert any(word.startswith("https://") for word in it["command"])


def test_disabled_parts_are_turned_off_in_the_environment(tmp_path: Path) -> None:
    offline = inside(render({"hub": {"enabled": False}}), "trainer", tmp_path).variables
    assert offline["HF_HUB_OFFLINE"] == "1"
    assert offline["NCCL_IB_DISABLE"] == "1", "without RDMA devices"
    with_rdma = inside(render({"nccl": {"rdma": {"enabled": True}}}), "generator", tmp_path).variables
    assert "NCCL_IB_DISABLE" not in with_rdma
    assert "HF_HUB_OFFLINE" not in with_rdma


def test_credentials_of_a_bucket_and_of_the_hub_are_files() -> None:
    store = {
        "existingSecret": "bucket",
        "env": {"AWS_SHARED_CREDENTIALS_FILE": "/run/secrets/headrace-store/credentials"},
    }
    found = workloads(render({"storage": {"objectStore": store}, "hub": {"tokenSecret": "hub"}}))
    for workload in ("trainer", "generator"):
        variables, mounted = environment(found[workload], pod="p"), mounts(found[workload])
        assert mounted["/run/secrets/headrace-store"]["volume"]["secret"]["secretName"] == "bucket"
        assert variables["AWS_SHARED_CREDENTIALS_FILE"] == "/run/secrets/headrace-store/credentials"
        assert mounted["/run/secrets/headrace-hub"]["volume"]["secret"]["secretName"] == "hub"
        assert variables["HF_TOKEN_PATH"] == "/run/secrets/headrace-hub/token"
    assert "/run/secrets/headrace-store" not in mounts(found["rewarder"])
    for workload in ("rewarder", "sessions"):
        assert not {"/run/secrets/headrace-store", "/run/secrets/headrace-hub"} & mounts(found[workload]).keys(), (
            "users' code could read them, and no model is loaded there"
        )
        assert "HF_TOKEN_PATH" not in environment(found[workload], pod="p")
    with_models = workloads(render({"rewarder": {"gpus": 1}, "hub": {"tokenSecret": "hub"}}))["rewarder"]
    assert "/run/secrets/headrace-hub" in mounts(with_models)
    assert environment(with_models, pod="p")["HF_TOKEN_PATH"] == "/run/secrets/headrace-hub/token"


@pytest.mark.parametrize("name", ALL_VALUES)
def test_no_secret_is_ever_a_variable(name: str) -> None:
    for it in workloads(render(values_of(name))).values():
        assert "envFrom" not in container(it)
        assert not any("secretKeyRef" in entry.get("valueFrom", {}) for entry in container(it).get("env", []))
