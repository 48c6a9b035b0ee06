"""The output of `docker compose` for deploy/docker-compose.yml, which does not need a Docker engine."""

import json
import os
import shutil
import subprocess

import pytest

from tests.compose.compose_file import DEPLOY, HARDWARE, PROFILE_CHECK, services, variables


def compose(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Compose on the file, without a .env."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("`docker compose` is not installed")
    return subprocess.run(
        [docker, "compose", "-f", str(DEPLOY / "docker-compose.yml"), "--env-file", os.devnull, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("chosen", ["", "gup", "watch"])
def test_compose_itself_says_what_to_set_when_no_profile_starts_the_stack(chosen: str) -> None:
    done = compose("config", "--quiet", COMPOSE_PROFILES=chosen)
    assert done.returncode != 0
    assert PROFILE_CHECK in done.stderr


@pytest.mark.parametrize("are_set", [False, True])
@pytest.mark.parametrize("profile", [*HARDWARE, "watch", "demo"])
def test_compose_itself_accepts_the_file(profile: str, *, are_set: bool) -> None:
    profiles = [profile] if profile in HARDWARE else ["cpu", profile]
    # Releases of Compose differ in how they parse a default with braces, and only if the variable is set.
    given = {name: max(defaults) for name, defaults in variables().items()} if are_set else {}
    given |= {"HEADRACE_ENGINE_ARGS": '{"gpu_memory_utilization": 0.5}'} if are_set else {}
    done = compose(*(f"--profile={one}" for one in profiles), "config", "--format", "json", **given)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)["services"]
    del read[PROFILE_CHECK]
    ours_too = services(*profiles, environment=given)
    assert set(read) == set(ours_too), "compose_file.py reads it as Compose does"
    for name, service in ours_too.items():
        ours = {key: str(value) for key, value in service.get("environment", {}).items()}
        assert read[name].get("environment", {}) == ours
