"""Secrets that are mounted as files: how services read them, and the message if one is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.settings import ServiceSettings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ["services.generator", "services.rewarder", "services.sessions", "services.trainer"]


def secret(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def wrong(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        ServiceSettings(**values)  # type: ignore[arg-type]
    return str(caught.value.errors(include_url=False, include_input=False)[0]["msg"])


def test_a_file_is_the_secret_without_the_line_end(tmp_path: Path) -> None:
    settings = ServiceSettings(
        api_key_file=secret(tmp_path / "a", "key-1\n"), internal_key_file=secret(tmp_path / "b", " key-2 \n")
    )
    assert settings.api_key.get_secret_value() == "key-1"
    assert settings.internal_key.get_secret_value() == "key-2"


def test_the_password_of_redis_joins_the_user_of_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "rediss://trainer@redis:6380/2?a=b")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(secret(tmp_path / "p", "p/w:1@\n")))
    settings = ServiceSettings()
    assert settings.redis_url.get_secret_value() == "rediss://trainer:p%2Fw%3A1%40@redis:6380/2?a=b"
    assert settings.secrets_of_a_child()["HEADRACE_REDIS_URL"] == "rediss://trainer@redis:6380/2?a=b"


def test_a_url_without_a_user_gets_the_password_of_the_default_user(tmp_path: Path) -> None:
    settings = ServiceSettings(redis_password_file=secret(tmp_path / "p", "pw"))
    assert settings.redis_url.get_secret_value() == "redis://:pw@127.0.0.1:6379/0"
    assert settings.secrets_of_a_child()["HEADRACE_REDIS_URL"] == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize("name", ["api_key", "internal_key"])
def test_a_secret_and_its_file_are_one_too_many(name: str, tmp_path: Path) -> None:
    said = wrong(**{name: "canary", f"{name}_file": secret(tmp_path / "s", "other")})
    assert f"both HEADRACE_{name.upper()} and HEADRACE_{name.upper()}_FILE are set" in said
    assert "canary" not in said


def test_a_password_in_the_url_and_in_a_file_are_one_too_many(tmp_path: Path) -> None:
    said = wrong(redis_url="redis://:canary@h/0", redis_password_file=secret(tmp_path / "s", "other"))
    assert "keep one of them" in said
    assert "canary" not in said


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "cannot be read: No such file"), ("", "is empty"), (" \n", "is empty"), ("two words", "one secret"),
     ("x" * 5000, "one secret")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["api_key_file", "internal_key_file", "redis_password_file"])
def test_a_file_that_holds_no_secret_is_refused_by_name(
    name: str, content: str | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        secret(path, content)
    said = wrong(**{name: path})
    assert f"HEADRACE_{name.upper()}: {path} " in said
    assert complaint in said


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", "")
    assert ServiceSettings().api_key_file is None


def test_keys_from_files_open_a_service_to_other_machines(tmp_path: Path) -> None:
    path = secret(tmp_path / "s", "k")
    assert ServiceSettings(host="0.0.0.0", api_key_file=path, internal_key_file=path).host == "0.0.0.0"
    assert "HEADRACE_API_KEY_FILE" in wrong(host="0.0.0.0")


def test_a_child_finds_the_secrets_where_they_are(tmp_path: Path) -> None:
    settings = ServiceSettings(
        api_key="plain",  # type: ignore[arg-type]
        internal_key_file=secret(tmp_path / "i", "in-a-file"),
        redis_password_file=secret(tmp_path / "r", "also-in-a-file"),
    )
    variables = settings.secrets_of_a_child()
    assert variables["HEADRACE_INTERNAL_KEY_FILE"] == str(tmp_path / "i")
    assert not [value for value in variables.values() if "in-a-file" in value], "a file stays the only place"
    assert not [value for value in variables.values() if "plain" in value], "it needs no key of users"


def test_a_child_reads_secrets_that_came_by_the_environment_and_has_none_in_its_own(tmp_path: Path) -> None:
    url = "rediss://trainer:canary-%2Fword@redis:6380/2"
    ours = {"HEADRACE_REDIS_URL": url, "HEADRACE_INTERNAL_KEY": "canary-key", "HEADRACE_API_KEY": "canary-of-users"}
    code = """
import os, subprocess, sys
from shared.service.child_secrets import hide_secrets
from shared.settings import ServiceSettings, from_environment
settings = from_environment(ServiceSettings)
if len(sys.argv) > 1:
    print(settings.redis_url.get_secret_value(), settings.internal_key.get_secret_value(), settings.api_key)
    print("can" "ary-" in open("/proc/self/environ").read())
    sys.exit()
hide_secrets(os.environ)
for variables in ({}, settings.secrets_of_a_child()):
    environment = {**os.environ, **variables}
    subprocess.run([sys.executable, "-c", os.environ["CODE"], "child"], env=environment, check=True)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**environment, **ours, "CODE": code}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["redis://127.0.0.1:6379/0  ", "False", f"{url} canary-key ", "False"], (
        done.stderr
    )


@pytest.mark.parametrize("module", SERVICES)
def test_a_missing_secret_ends_the_service_with_status_2_and_a_sentence(module: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm" if module.endswith("generator") else "uvicorn")
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_API_KEY_FILE": str(tmp_path / "nothing"), "HEADRACE_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last_words = json.loads(done.stderr.splitlines()[-1])
    assert f"HEADRACE_API_KEY_FILE: {tmp_path / 'nothing'} cannot be read" in last_words["message"]
    assert "Traceback" not in done.stderr
