"""`headrace doctor` as a command: where it looks, its output and exit status; finally on the real services."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.cli import command_line as cli
from shared.redis.keys import FLEET, FLEET_LEASES
from tests.headrace.doctor.doctor_rig import API_KEY, INTERNAL_KEY, service
from tests.headrace.launcher_rig import ROOT, local_service
from tests.kept_ports import kept_port

DOCTOR = ("doctor", "--timeout-s", "60")
VARIABLES = ("API_KEY", "INTERNAL_KEY", "REDIS_URL", "REDIS_PASSWORD", "REWARDER_URL", "URL", "STATE_DIR")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, with no environment variable that names a service."""
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        for variable in (f"HEADRACE_{name}", f"HEADRACE_{name}_FILE"):
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no headrace service found"),
        (["--url", "trainer:8400"], "trainer:8400 is not an http:// or https:// address"),
        (["--url", "user:secret@trainer"], "an address of headrace has no user and no password"),
        (["--url", "http://user:secret/x@trainer"], "an address of headrace has no user and no password"),
        (["--url", "http://"], "is not an http:// or https:// address"),
        (["--url", "http://[::1"], "cannot be read"),
        (["--url", "http://a:99999"], "cannot be read"),
        (["--redis-url", "http://user:secret@redis"], "redis is not a redis:// or rediss:// address"),
        (["--redis-url", "http://user:a@secret@redis"], "redis is not a redis:// or rediss:// address"),
        (["--redis-url", "redis://:secret/def@redis:6379/0"], "percent-encode the password in it"),
    ],
)
def test_where_nothing_can_be_looked_at_the_status_is_2_and_a_sentence_says_why(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert "secret" not in shown.err


def test_keys_may_come_from_files_and_a_fine_deployment_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "api-key").write_text(API_KEY + "\n")
    (tmp_path / "internal-key").write_text(INTERNAL_KEY)
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "api-key"))
    monkeypatch.setenv("HEADRACE_INTERNAL_KEY_FILE", str(tmp_path / "internal-key"))
    with service("trainer") as api:
        assert cli.main([*DOCTOR, "--url", api.url]) == 0
    shown = capsys.readouterr().out
    assert "takes the API key; takes the internal key" in " ".join(shown.split())
    assert "not looked at: its address is unknown" in shown


def test_a_key_file_that_is_not_there_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", "/nowhere/api-key")
    assert cli.main(["doctor", "--url", "http://127.0.0.1:1"]) == 2
    assert "HEADRACE_API_KEY_FILE: /nowhere/api-key cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("is_named", [False, True])
def test_keys_of_a_directory_are_not_sent_to_an_address_of_the_environment_and_doctor_reports_it(
    is_named: bool,
    tmp_path: Path,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_redis = f"redis://:own@127.0.0.1:{kept_port()}/0"
    with (
        service("trainer") as api,
        service("rewarder") as rewarder,
        service("rewarder") as foreign,
        service("generator") as registered,
    ):
        with redis.Redis.from_url(redis_url) as elsewhere:
            elsewhere.hset(FLEET, mapping={"g0": json.dumps({"url": registered.url})})
            elsewhere.zadd(FLEET_LEASES, {"g0": 9e15})
        monkeypatch.setenv("HEADRACE_API_KEY", "wrong-and-secret")
        monkeypatch.setenv("HEADRACE_REDIS_URL", redis_url)
        monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", "/nowhere/redis-password")
        monkeypatch.setenv("HEADRACE_REWARDER_URL", foreign.url)
        state = local_service(tmp_path / ".headrace", api.url, rewarder_url=rewarder.url, redis_url=own_redis)
        for name, key in (("api_key", API_KEY), ("internal_key", INTERNAL_KEY)):
            state.key_file(name).write_text(key)
        if is_named:
            monkeypatch.setenv("HEADRACE_URL", foreign.url)
        assert cli.main([*DOCTOR, "--json", *(["--state-dir", str(state.path)] if is_named else [])]) == 1
        said = json.loads(capsys.readouterr().out)["findings"]
        assert foreign.asked == []
        assert registered.asked == []
    wrong = {(one["where"], one["check"]) for one in said if one["level"] == "problem"}
    assert wrong == {("redis", "reachable")}
    (unused,) = [one for one in said if one["check"] == "environment"]
    names = ["HEADRACE_API_KEY", *(["HEADRACE_URL"] if is_named else []), "HEADRACE_REWARDER_URL", "HEADRACE_REDIS_URL"]
    assert unused["level"] == "note"
    assert unused["says"] == (
        f"{', '.join(names)}: set but not used, because all addresses and keys come from {state.path}"
    )
    assert "with --url, --rewarder-url, --sessions-url and --redis-url" in unused["do"]
    assert "wrong-and-secret" not in json.dumps(said)


def test_variables_that_agree_with_the_directory_cause_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = kept_port()
    with service("trainer") as api, service("rewarder") as rewarder:
        state = local_service(
            tmp_path / ".headrace", api.url, rewarder_url=rewarder.url, redis_url=f"redis://me:pw@127.0.0.1:{port}/0"
        )
        state.key_file("api_key").write_text(API_KEY)
        monkeypatch.setenv("HEADRACE_API_KEY", API_KEY)
        monkeypatch.setenv("HEADRACE_REWARDER_URL", rewarder.url)
        monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://me@127.0.0.1:{port}/0")
        cli.main([*DOCTOR, "--json"])
    said = json.loads(capsys.readouterr().out)["findings"]
    assert "environment" not in {one["check"] for one in said}


def test_problems_are_listed_with_a_remedy_and_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "wrong-and-secret")
    monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://user:hidden@127.0.0.1:{kept_port()}/0")
    with service("trainer") as api:
        assert cli.main([*DOCTOR, "--url", api.url]) == 1
        table = capsys.readouterr().out
        assert cli.main([*DOCTOR, "--url", api.url, "--json"]) == 1
        body = json.loads(capsys.readouterr().out)
    assert "What to do" in table
    assert "trainer does not take the API key that doctor was given in HEADRACE_API_KEY" in " ".join(table.split())
    assert table.splitlines()[-1].endswith(" s")
    assert body["status"] == "problems"
    assert body["exit_status"] == 1
    problems = {(one["where"], one["check"]) for one in body["findings"] if one["level"] == "problem"}
    assert problems == {("doctor", "API key"), ("redis", "reachable")}
    for secret in ("wrong-and-secret", "hidden"):
        assert secret not in table + json.dumps(body)


def run(*arguments: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=directory,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def eventually_fine(directory: Path) -> dict[str, Any]:
    """Return doctor's output once the generators have registered."""
    deadline = time.monotonic() + 120
    while True:
        done = run(*DOCTOR, "--json", directory=directory)
        body: dict[str, Any] = json.loads(done.stdout)
        if done.returncode == 0:
            return body
        assert time.monotonic() < deadline, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_services_are_fine_and_are_not_when_a_key_or_a_service_is_missing(tmp_path: Path) -> None:
    up = run("up", "--simulate", "2", "--detach", directory=tmp_path)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        body = eventually_fine(tmp_path)
        fine = {(one["where"], one["check"]) for one in body["findings"] if one["level"] == "ok"}
        assert {("trainer", "ready"), ("rewarder", "ready"), ("redis", "append-only file")} <= fine
        assert {("simulated-000", "internal key"), ("simulated-001", "internal key")} <= fine
        assert {service["headrace"] for service in body["services"].values()} == {"0.1.0"}
        url = json.loads((tmp_path / ".headrace" / "endpoint.json").read_text())["api_url"]
        wrong = run(*DOCTOR, "--url", url, directory=tmp_path, HEADRACE_API_KEY="another")
        assert wrong.returncode == 1
        assert "does not take the API key" in wrong.stdout
        assert run(*DOCTOR, "--url", url, directory=tmp_path).returncode == 2
    finally:
        down = run("down", directory=tmp_path)
    assert down.returncode == 0, down.stderr
    gone = run(*DOCTOR, "--url", url, directory=tmp_path, HEADRACE_API_KEY="another")
    assert gone.returncode == 1
    assert "Traceback" not in gone.stdout + gone.stderr + wrong.stderr
