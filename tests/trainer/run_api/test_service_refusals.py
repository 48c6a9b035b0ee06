"""The process ``python -m services.trainer`` reports in one sentence why it does not start."""

import json
import re
import socket
import subprocess
import sys

import pytest
import redis

from tests.kept_ports import kept_port
from tests.trainer.api_rig import KEY
from tests.trainer.service_rig import ROOT


def end(environment: dict[str, str]) -> tuple[int, str]:
    """Run a service that must end by itself; returns exit status and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_wrong_settings_are_sentences_and_exit_status_2_and_an_unknown_one_is_named_once(
    environment: dict[str, str],
) -> None:
    wrong = {
        "HEADRACE_PORT": "many",
        "HEADRACE_REWARDER_URL": "http://user:secret@rewarder:8200",
        "HEADRACE_SESSIONS_URL": "sessions:8300",
        "HEADRACE_LOG_FORMAT": "xml",
    }
    status, said = end(environment | wrong | {"HEADRACE_METRIC_PORT": "9"})
    assert status == 2
    for sentence in (
        r"HEADRACE_PORT: .*valid integer",
        r"HEADRACE_REWARDER_URL: .*the address of a service has no user and no password",
        r"HEADRACE_SESSIONS_URL: .*is not an http:// or https:// address",
        r"HEADRACE_LOG_FORMAT: .*'json' or 'text'",
    ):
        assert re.search(sentence, said), said
    assert said.count("HEADRACE_METRIC_PORT is ignored") == 1
    assert KEY not in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"HEADRACE_HOST": "0.0.0.0"}, r"set HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY first"),
        ({"HEADRACE_RUNS_DIR": "runs"}, r"absolute path in HEADRACE_RUNS_DIR"),
        ({"HEADRACE_RUNS_DIR": "/dev/null"}, r"runs cannot be kept in /dev/null \(File exists\)"),
        ({"HEADRACE_RUNS_DIR": "/proc/runs"}, r"runs cannot be kept in /proc/runs \("),
        ({"HEADRACE_RANK_CPUS": "[100000]"}, r"CPUs \[100000\], which this process may not use"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_a_sentence_and_exit_status_2(
    environment: dict[str, str], changes: dict[str, str], sentence: str
) -> None:
    status, said = end(environment | changes)
    assert status == 2
    assert re.search(sentence, said), said
    assert KEY not in said


def test_a_taken_port_is_a_sentence_and_exit_status_2(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        more = {"HEADRACE_PORT": str(taken.getsockname()[1]), "HEADRACE_LOG_LEVEL": "CRITICAL"}
        status, said = end(environment | more)
    assert status == 2
    assert "set HEADRACE_PORT" in json.loads(said.splitlines()[-1])["message"]


def test_a_redis_that_never_comes_is_a_sentence_and_exit_status_1(environment: dict[str, str]) -> None:
    away = {"HEADRACE_REDIS_URL": f"redis://127.0.0.1:{kept_port()}/0", "HEADRACE_REDIS_PATIENCE_S": "0.3"}
    status, said = end(environment | away)
    assert status == 1
    assert "Redis PING failed" in said


def test_a_password_that_redis_does_not_take_ends_it_at_once_with_status_2(environment: dict[str, str]) -> None:
    url = environment["HEADRACE_REDIS_URL"].replace("redis://", "redis://nobody:wrong@")
    status, said = end(environment | {"HEADRACE_REDIS_URL": url, "HEADRACE_REDIS_PATIENCE_S": "600"})
    assert status == 2
    assert "Redis does not take the user and password" in json.loads(said.splitlines()[-1])["message"]


def test_a_redis_that_throws_rollouts_away_is_a_sentence_and_exit_status_2(environment: dict[str, str]) -> None:
    with redis.Redis.from_url(environment["HEADRACE_REDIS_URL"]) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            status, said = end(environment)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert status == 2
    assert "Set maxmemory-policy noeviction" in said
