"""The properties of deploy/docker-compose.yml that can be checked without a Docker engine."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from headrace.cli.command_line import make_parser
from headrace.doctor.targets import Targets, find_targets
from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from shared.run_options.run_config import parse_run_config
from shared.service.tls import PeerTls
from shared.settings import ServiceSettings
from tests.compose.compose_file import (
    DEPLOY,
    HARDWARE,
    PROFILE_CHECK,
    ROOT,
    load,
    networks,
    seconds,
    services,
    variables,
)

SETTINGS: dict[str, type[ServiceSettings]] = {
    "trainer": TrainerSettings,
    "generator": GeneratorSettings,
    "rewarder": RewarderSettings,
    "sessions": SessionsSettings,
}
ALL = services("gpu", "single-gpu", "cpu", "demo", "watch")
OURS = [name for name in ALL if name.partition("-")[0] in SETTINGS]


def kind(name: str) -> str:
    return name.partition("-")[0]


def image_environment(service: str) -> dict[str, str]:
    """Return the environment variables that the Dockerfile of a service sets."""
    text = (DEPLOY / "docker" / f"{service}.Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(r"(HEADRACE_[A-Z_]+)=(\S+)", "\n".join(re.findall(r"^ENV (?:.*\\\n)*.*$", text, re.M))))


@pytest.mark.parametrize("profile", HARDWARE)
def test_every_profile_starts_one_of_each(profile: str) -> None:
    names = {name: service for name, service in services(profile).items() if name != "gpu-namespaces"}
    assert sorted(kind(name) for name in names) == ["generator", "redis", "rewarder", "sessions", "trainer"]
    aliases = [alias for net in names.values() for alias in _aliases(net, "weights")]
    assert sorted(set(aliases)) == ["generator", "generator-weights", "trainer", "trainer-weights"], (
        "the same names in every profile"
    )


def _aliases(service: dict[str, Any], network: str) -> list[str]:
    attached: Any = service["networks"]  # a list of names, or a table of names with settings
    if isinstance(attached, list):
        return []
    settings = cast("dict[str, dict[str, Any] | None]", attached).get(network) or {}
    return list(settings.get("aliases", []))


@pytest.mark.parametrize("name", ALL)
def test_every_container_is_confined(name: str) -> None:
    service = ALL[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "volumes_from"} & set(service)
    assert service["pids_limit"] > 0
    assert re.fullmatch(r"\d+g", service["mem_limit"])
    assert service["user"].partition(":")[0] not in ("", "0", "root")
    assert service["restart"] == ("no" if name == "demo" else "unless-stopped")
    # A service in another's process namespace uses its init process.
    assert service["init"] is ("pid" not in service)
    assert "host" not in (service.get("network_mode"), service.get("pid"), service.get("ipc"))
    mounts = [volume.rpartition(":")[0] if volume.endswith(":ro") else volume for volume in service.get("volumes", [])]
    assert not [mount for mount in mounts if "docker.sock" in mount or mount.startswith(("/:", "/etc", "/var"))]


@pytest.mark.parametrize("profile", HARDWARE)
def test_compose_can_wait_for_every_container_of_a_profile(profile: str) -> None:
    """`docker compose up --wait` fails at once for a container whose health check is disabled."""
    checks = {name: service.get("healthcheck", {}) for name, service in services(profile, "watch").items()}
    assert not [name for name, check in checks.items() if check.get("disable") or check.get("test") == ["NONE"]]


@pytest.mark.parametrize("profile", HARDWARE)
def test_one_port_is_published_and_on_loopback(profile: str) -> None:
    ports = {name: service.get("ports", []) for name, service in services(profile).items()}
    published = [port for of_service in ports.values() for port in of_service]
    assert published == ["127.0.0.1:8400:8000"]
    watching = [port for service in services(profile, "watch").values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in watching)


def test_the_networks_allow_only_the_necessary_connections() -> None:
    standing = {name: networks(service) for name, service in ALL.items()}
    for name in standing:
        if kind(name) == "generator":
            met = {other for other in standing if other != name and standing[other] & standing[name]}
            assert {kind(other) for other in met} == {"trainer", "generator", "sessions", "redis", "prometheus"}
    assert standing["sessions"] == {"turns", "tools", "store-sessions", "watch-sessions", "out-sessions"}
    assert {kind(name) for name, nets in standing.items() if "turns" in nets} == {"sessions", "generator"}
    assert "rewards" in standing["rewarder"]
    assert not standing["rewarder"] & standing["generator"]
    assert not standing["grafana"] & {net for name in OURS for net in standing[name]}
    assert standing["redis"] == {f"store-{service}" for service in SETTINGS}, "it does not reach the internet"
    declared = load()["networks"]
    assert set(declared) == {network for nets in standing.values() for network in nets}
    for network, settings in declared.items():
        leads_outside = network.startswith(("front", "out-"))
        assert (not settings.get("internal")) is leads_outside
        if leads_outside:
            assert len({kind(name) for name, nets in standing.items() if network in nets}) == 1


def test_nccl_looks_for_its_interface_by_a_name_that_only_the_network_of_weights_knows() -> None:
    """Docker does not guarantee an order of interfaces, not even for a network with a priority."""
    for name in OURS:
        if kind(name) in ("rewarder", "sessions"):
            continue
        environment = ALL[name]["environment"]
        assert not any("IFNAME" in variable for variable in environment)
        known = {network for network in networks(ALL[name])
                 if environment["HEADRACE_PUSH_ADDRESS"] in _aliases(ALL[name], network)}  # fmt: skip
        assert known == {"weights"}


@pytest.mark.parametrize("name", OURS)
def test_the_environment_is_one_that_the_service_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, settings_type = ALL[name], SETTINGS[kind(name)]
    environment = image_environment(kind(name)) | {key: str(value) for key, value in service["environment"].items()}
    mounted = {secret["target"]: secret["source"] for secret in service["secrets"]}
    has_token = kind(name) in ("trainer", "generator")
    assert mounted.pop(environment.get("HF_TOKEN_PATH", ""), None) == ("hub-token" if has_token else None)
    key_of_tracker = mounted.pop(environment.get("WANDB_API_KEY_FILE", ""), None)
    assert key_of_tracker == ("wandb-api-key" if kind(name) == "trainer" else None)
    for variable in [key for key in os.environ if key.startswith("HEADRACE_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment.items():
        if not variable.startswith("HEADRACE_"):
            continue
        field = variable.removeprefix("HEADRACE_").lower()
        assert field in settings_type.model_fields, f"{name} has no setting {variable}"
        if variable.endswith("_FILE") and value:
            secret = tmp_path / mounted.pop(value)
            secret.write_text(f"content-of-{secret.name}\n", encoding="utf-8")
            value = str(secret)
        if field in ("reward_path", "tool_path", "gpu_claims_dir", "reward_secrets_dir"):
            value = str(tmp_path)
        monkeypatch.setenv(variable, value)
    assert not mounted, "a secret is mounted that the service does not read"
    settings = settings_type()
    assert settings.api_key.get_secret_value() == "content-of-api-key"
    assert settings.internal_key.get_secret_value() == ("" if name == "rewarder" else "content-of-internal-key")
    assert settings.redis_url.get_secret_value() == (
        f"redis://{kind(name)}:content-of-redis-password-{kind(name)}@redis:6379/0"
    )
    assert (settings.host, settings.port, settings.metrics_port) == ("0.0.0.0", 8000, 9090)


@pytest.mark.parametrize("name", ["trainer", "trainer-single", "trainer-cpu"])
def test_headrace_doctor_finds_all_services_where_the_page_runs_it(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "docker-compose.md").read_text(encoding="utf-8")
    (source, target, words) = re.findall(
        r'^docker compose run .*-v "\$\(realpath (\S+)\):(\S+):ro" .* trainer -m headrace (doctor .*)$', page, re.M
    )[0]
    assert (DEPLOY / source / "doctor").is_dir()
    dockerfile = (DEPLOY / "docker" / "trainer.Dockerfile").read_text(encoding="utf-8")
    assert f" PYTHONPATH={Path(target).parent} " in dockerfile
    environment = {key: str(value) for key, value in ALL[name]["environment"].items()}
    for secret in ALL[name]["secrets"]:
        (tmp_path / secret["source"]).write_text(f"content-of-{secret['source']}", encoding="utf-8")
        environment = {
            key: value.replace(secret["target"], str(tmp_path / secret["source"])) for key, value in environment.items()
        }
    targets = find_targets(make_parser().parse_args(words.split()), environment)
    assert targets == Targets(
        api_url="http://trainer:8000",
        rewarder_urls=("http://rewarder:8000",),
        sessions_urls=("http://sessions:8000",),
        redis_url="redis://trainer:content-of-redis-password-trainer@redis:6379/0",
        api_key="content-of-api-key",
        internal_key="content-of-internal-key",
        api_key_source=f"HEADRACE_API_KEY_FILE ({tmp_path / 'api-key'})",
        internal_key_source=f"HEADRACE_INTERNAL_KEY_FILE ({tmp_path / 'internal-key'})",
        tls=PeerTls(server_name="generator"),
    )
    assert "trainer" in {alias for network in networks(ALL[name]) for alias in _aliases(ALL[name], network)}


@pytest.mark.parametrize("name", OURS)
def test_the_page_names_the_files_of_named_keys_and_certificates_where_they_are_mounted(name: str) -> None:
    page = (ROOT / "docs" / "docker-compose.md").read_text(encoding="utf-8")
    given = dict(
        re.findall(
            r"^(HEADRACE_(?:API_KEYS_FILE|TLS_\w+_FILE|(?:REWARDER|SESSIONS|SESSIONS_ADVERTISE)_URL))=(\S+)", page, re.M
        )
    )
    assert len(given) == 7
    service = load(given)["services"][name]
    directories = {volume.split(":")[1] for volume in service["volumes"] if volume.endswith(":ro")}
    environment = service["environment"]
    files = [variable for variable in given if variable.endswith("_FILE") and variable in environment]
    assert len(files) == (4 if kind(name) in ("trainer", "sessions") else 3)
    for variable in files:
        assert environment[variable] == given[variable]
        assert str(Path(given[variable]).parent) in directories, (
            "a directory is mounted, because a mounted file would not change"
        )
    if kind(name) == "trainer":
        for variable in ("HEADRACE_REWARDER_URL", "HEADRACE_SESSIONS_URL"):
            assert environment[variable] == given[variable]
    if kind(name) == "sessions":
        assert environment["HEADRACE_ADVERTISE_URL"] == given["HEADRACE_SESSIONS_ADVERTISE_URL"]
        assert "https://127.0.0.1:8000" in given.values(), (
            "agent functions run beside it: certificates name no container"
        )


@pytest.mark.parametrize("name", ALL)
def test_no_secret_stands_in_an_environment(name: str) -> None:
    for variable, value in ALL[name].get("environment", {}).items():
        if re.search("KEY|PASSWORD|SECRET|TOKEN", variable):
            assert variable.endswith(("_FILE", "_PATH", "_DIR")), variable
            assert not value or str(value).startswith(("/run/secrets/headrace/", "/run/secrets/headrace-")), value
        assert not re.search(r"://[^@/]*:[^@/]*@", str(value)), f"a password in {variable}"


@pytest.mark.parametrize("name", OURS)
def test_a_container_is_given_the_time_its_service_takes_to_stop(name: str) -> None:
    environment, grace_s = ALL[name]["environment"], seconds(ALL[name]["stop_grace_period"])
    takes_s = {
        "trainer": float(environment.get("HEADRACE_RANK_STOP_GRACE_S", 0)) + 5,  # and the run API's open requests
        "generator": 10.0,  # service_life.py
        "rewarder": float(environment.get("HEADRACE_DRAIN_S", 0)) + 5 + 5,
        "sessions": 5.0,  # service_process.py; groups are left to other replicas at once
    }[kind(name)]
    assert grace_s >= takes_s + 10


def test_gpus_are_given_out_by_service_and_only_with_a_gpu_profile() -> None:
    environment = {"HEADRACE_TRAINER_GPUS": "0,1", "HEADRACE_GENERATOR_GPUS": "2,3,4", "HEADRACE_REWARDER_GPUS": "5"}
    several = services("gpu", environment=environment)
    assert several["trainer"]["environment"]["NVIDIA_VISIBLE_DEVICES"] == "0,1"
    assert several["generator"]["environment"]["NVIDIA_VISIBLE_DEVICES"] == "2,3,4"
    assert str(several["rewarder"]["environment"]["NVIDIA_VISIBLE_DEVICES"]) == "5"
    assert several["generator"]["runtime"] == several["trainer"]["runtime"] == "nvidia"
    assert "gpu-claims:/gpu-claims" in several["generator"]["volumes"]
    assert several["generator"]["environment"]["HEADRACE_GPU_CLAIMS_DIR"] == "/gpu-claims"
    one = services("single-gpu", environment={"HEADRACE_TRAINER_GPUS": "3"})
    for name in ("trainer-single", "generator-single"):
        assert str(one[name]["environment"]["NVIDIA_VISIBLE_DEVICES"]) == "3"
    for name, service in services("cpu").items():
        assert service.get("runtime", "runc") == "runc", name
        assert service["environment"].get("NVIDIA_VISIBLE_DEVICES", "void") == "void"
        assert name == "redis" or service["image"].endswith("-cpu")


def test_namespaces_are_shared_with_a_container_that_runs_nothing_that_could_fail() -> None:
    """If the owner of a process namespace ends, the others end too, and Docker does not restart them without it."""
    one = services("single-gpu")
    owner = one.pop("gpu-namespaces")
    assert owner["entrypoint"] == ["sleep", "infinity"]
    assert (owner["ipc"], owner["network_mode"], owner["restart"]) == ("shareable", "none", "unless-stopped")
    assert re.fullmatch(r"\d+g", owner["shm_size"]), "of both"
    for name in ("trainer-single", "generator-single"):
        service = one.pop(name)
        assert service["ipc"] == service["pid"] == "service:gpu-namespaces"
    assert not any({"ipc", "pid"} & set(service) for service in [*one.values(), *services("gpu").values()])


def test_reward_code_can_write_nothing_that_another_service_reads() -> None:
    def mounts(name: str) -> dict[str, bool]:
        return {volume.split(":")[0]: volume.endswith(":ro") for volume in ALL[name].get("volumes", [])}

    for name in [name for name in ALL if name != "rewarder"]:
        shared = mounts("rewarder").keys() & mounts(name).keys()
        assert all(mounts("rewarder")[volume] for volume in shared), f"{name}: {shared}"
    assert "hub:/hub" in ALL["generator"]["volumes"], "trainer and generators still have one"


def test_secrets_of_endpoints_are_files_that_only_the_rewarder_reads() -> None:
    (mount,) = [volume for volume in ALL["rewarder"]["volumes"] if "secrets" in volume.partition(":")[0]]
    source, target, mode = mount.split(":")
    assert ALL["rewarder"]["environment"]["HEADRACE_REWARD_SECRETS_DIR"] == target
    assert mode == "ro"
    assert (DEPLOY / source / "README.md").is_file()
    assert f"deploy/{source.removeprefix('./')}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert f"deploy/{source.removeprefix('./')}/*" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert [name for name in ALL if source in str(ALL[name].get("volumes"))] == ["rewarder"]


def test_every_service_that_loads_from_the_hub_has_its_settings_of_the_hub() -> None:
    given = {"HF_ENDPOINT": "https://hub.example.com", "HF_HUB_OFFLINE": "1"}
    for name, service in load(given)["services"].items():
        if any(volume.endswith(":/hub") for volume in service.get("volumes", [])):
            assert service["environment"].items() >= given.items(), name


@pytest.mark.parametrize("profile", HARDWARE)
def test_code_of_clients_is_off_and_only_the_trainer_can_write_it(profile: str) -> None:
    default, on = services(profile), services(profile, environment={"HEADRACE_CODE_UPLOADS_DIR": "/code"})
    (trainer,) = [name for name in default if kind(name) == "trainer"]
    assert default[trainer]["environment"]["HEADRACE_CODE_UPLOADS_DIR"] == ""
    assert on[trainer]["environment"]["HEADRACE_CODE_UPLOADS_DIR"] == "/code"
    mounted = {
        name: mount for name, service in default.items() for mount in service.get("volumes", []) if ":/code" in mount
    }
    assert mounted == {trainer: "code:/code", "rewarder": "code:/code:ro", "sessions": "code:/code:ro"}
    assert default["rewarder"]["environment"]["HEADRACE_REWARD_PATH"] == "/rewards:/code"
    assert default["sessions"]["environment"]["HEADRACE_TOOL_PATH"] == "/tools:/code"
    directory = services(profile, environment={"HEADRACE_CODE": "/srv/code"})
    assert "/srv/code:/code" in directory[trainer]["volumes"]


@pytest.mark.parametrize("name", OURS)
def test_a_named_volume_belongs_to_the_services_user(name: str) -> None:
    """Docker gives a new volume the owner of the directory in the image. One that the image lacks is root's."""
    mounts = [volume.split(":")[:2] for volume in ALL[name]["volumes"]]
    targets = {target for source, target in mounts if source in load()["volumes"]}
    text = (DEPLOY / "docker" / f"{kind(name)}.Dockerfile").read_text(encoding="utf-8")
    owned = [set(paths.split()) for paths in re.findall(r"chown headrace:headrace (/[^\\\n]+)", text)]
    assert owned
    assert not [targets - paths for paths in owned if targets - paths]


def test_the_trainer_finds_a_token_of_the_hub_when_there_is_one(tmp_path: Path) -> None:
    from services.trainer.submit_checks.surroundings_check import has_hub_token

    (target,) = [one["target"] for one in ALL["trainer"]["secrets"] if one["source"] == "hub-token"]
    assert ALL["trainer"]["environment"]["HF_TOKEN_PATH"] == target
    token = tmp_path / "hub-token"
    for content, is_one in (("", False), ("hf_mine\n", True)):
        token.write_text(content, encoding="utf-8")
        assert has_hub_token({"HF_TOKEN_PATH": str(token)}) is is_one


def test_compilers_can_load_what_they_make() -> None:
    """Docker mounts a tmpfs noexec by default, and then no library can be loaded from it."""
    for name, service in ALL.items():
        if kind(name) in ("trainer", "generator"):
            (options,) = [mount.partition(":")[2].split(",") for mount in service["tmpfs"] if mount.startswith("/tmp:")]
            assert "exec" in options, name
    for image in ("trainer", "generator", "rewarder"):
        text = (DEPLOY / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8")
        for variable, directory in (("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("TRITON_CACHE_DIR", "triton")):
            assert f"{variable}=/cache/{directory}" in text
        assert all("cache-" in str(service["volumes"]) for name, service in ALL.items() if kind(name) == image)


def test_generators_have_no_fixed_name_or_port_so_that_they_can_be_scaled() -> None:
    for name, service in ALL.items():
        if kind(name) == "generator":
            assert not {"container_name", "hostname", "ports"} & set(service)
            assert not {"HEADRACE_REPLICA_ID", "HEADRACE_ADVERTISE_URL"} & set(service["environment"])


def test_images_are_pinned_and_shared_memory_is_enough_for_torch() -> None:
    for name, service in ALL.items():
        _, _, tag = service["image"].rpartition(":")
        assert tag, name
        assert tag != "latest"
        if kind(name) in ("trainer", "generator") and "ipc" not in service:
            assert re.fullmatch(r"\d+g", service["shm_size"])


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.*)"', text, re.M)
    for name in (*OURS, "redis", "demo"):
        assert ALL[name]["image"].partition(":")[2] in (version, f"{version}-cpu")
    assert variables()["HEADRACE_VERSION"] == {version}


def test_the_service_without_a_container_depends_on_a_service_of_every_profile() -> None:
    everything = load()["services"]
    check = everything[PROFILE_CHECK]
    assert "profiles" not in check
    assert check["scale"] == 0
    (needed,) = check["depends_on"]
    assert set(everything[needed]["profiles"]) == set(HARDWARE)
    assert "-or-".join(HARDWARE) in PROFILE_CHECK
    # Containers store their dependencies. `docker compose -p headrace stop` would look for a container of this service.
    assert not [name for name, service in everything.items() if PROFILE_CHECK in service.get("depends_on", ())]


def test_the_first_runs_are_runs() -> None:
    first = json.loads((DEPLOY / "first-run.json").read_text(encoding="utf-8"))
    assert first == yaml.safe_load((ROOT / "examples" / "gsm8k-qwen3-0.6b.yaml").read_text(encoding="utf-8"))
    demo = json.loads((DEPLOY / "demo" / "run.json").read_text(encoding="utf-8"))
    for config in (first, demo):
        parse_run_config(config)
    assert demo["model"].startswith("/models/")


def test_the_mounted_files_of_monitoring_exist() -> None:
    if not (DEPLOY / "observability").is_dir():
        pytest.skip("deploy/observability is not in this checkout")
    for name in ("prometheus", "grafana"):
        for volume in ALL[name]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source


@pytest.mark.parametrize(
    "named", ["elsewhere", "./elsewhere", '"./elsewhere"', "./elsewhere # as on the other machine", "absolute"]
)
def test_secrets_are_made_where_env_says(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_SECRETS", raising=False)
    directory = tmp_path / "elsewhere"
    shutil.copy(DEPLOY / "make-secrets", tmp_path)
    (tmp_path / ".env").write_text(
        f"HEADRACE_SECRETS={directory if named == 'absolute' else named}\n", encoding="utf-8"
    )
    subprocess.run([tmp_path / "make-secrets"], check=True, capture_output=True)
    assert (directory / "api-key").is_file()
    assert not (tmp_path / "secrets").exists()


def test_secrets_are_made_once_for_their_owner_and_readable_in_containers(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run([DEPLOY / "make-secrets", directory], check=True, capture_output=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}
    assert set(made) == set(load()["secrets"])
    assert made.pop("hub-token") == made.pop("wandb-api-key") == "", "the user may fill these in later"
    (directory / "hub-token").write_text("hf_mine", encoding="utf-8")
    assert len(set(made.values())) == len(made)
    assert all(re.fullmatch("[0-9a-f]{48}", content) for content in made.values())
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o444, 0o644}
    (directory / "api-key").unlink()
    subprocess.run([DEPLOY / "make-secrets", directory], check=True, capture_output=True)
    again = {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}
    assert {name for name in made if again[name] != made[name]} == {"api-key"}
    assert again["hub-token"] == "hf_mine"
