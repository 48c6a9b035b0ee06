"""The process ``python -m services.trainer``: it starts with sentences, and it leaves no process behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import redis

from services.trainer.settings import TrainerSettings
from shared.keys import RunKeys
from tests.api.api_rig import KEY, FakeRewarder
from tests.api.rank_rig import COMMAND, RankPlan, is_alive
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
Run = dict[str, Any]


class Service:
    """A running trainer service."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._log = log
        self.port = int(environment["HEADRACE_PORT"])
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer"], cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=20,
            trust_env=False,
        )

    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/readyz").status_code == 200
        return False

    def submit(self, run: Run) -> str:
        reply = self.client.post("/v1/runs", json=run)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["run"]["run_id"])

    def status(self, run_id: str) -> str:
        return str(self.client.get(f"/v1/runs/{run_id}").json()["status"])

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(timeout=20)


Start = Callable[..., Service]


@pytest.fixture
def plan(tmp_path: Path) -> RankPlan:
    """Return what ranks will do."""
    return RankPlan(tmp_path)


@pytest.fixture
def environment(settings: TrainerSettings, plan: RankPlan) -> dict[str, str]:
    """Return the environment of a service whose rank works until it is asked to stop."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return own | {
        "HEADRACE_REDIS_URL": settings.redis_url.get_secret_value(),
        "HEADRACE_PORT": str(free_port()),
        "HEADRACE_API_KEY": KEY,
        "HEADRACE_RUNS_DIR": str(settings.runs_dir),
        "HEADRACE_REWARDER_URL": settings.rewarder_url,
        "HEADRACE_RANK_COMMAND": "[" + ", ".join(f'"{word}"' for word in COMMAND) + "]",
        "HEADRACE_SUPERVISE_EVERY_S": "0.05",
        "HEADRACE_RANK_STOP_GRACE_S": "1",
        "FAKE_RANK_DIR": str(plan.directory),
        "FAKE_RANK_PLAN": "work finish",
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Generator[Start]:
    """Return a function that starts a service and waits until it is ready."""
    started: list[Service] = []

    def start_service(**more: str) -> Service:
        service = Service(environment | more, tmp_path / "service.log")
        started.append(service)
        wait_until(service.is_ready)
        return service

    yield start_service
    for service in started:
        service.close()


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def end(environment: dict[str, str]) -> tuple[int, str]:
    """Run a service that must end by itself; returns exit status and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_sigterm_ends_streams_and_rank_and_the_run_goes_on_at_the_next_start(
    start: Start, run: Run, plan: RankPlan
) -> None:
    first = start()
    run_id = first.submit(run)
    wait_until(plan.is_at_work)
    with first.client.stream("GET", f"/v1/runs/{run_id}/events") as watched:
        first.process.send_signal(signal.SIGTERM)
        assert [line for line in watched.iter_lines() if line.startswith("event")] == []
    assert first.process.wait(timeout=20) == 0
    assert not is_alive(plan.pids()[0])
    assert "Traceback" not in first.log()

    second = start()
    wait_until(lambda: second.status(run_id) == "finished")
    assert len(plan.pids()) == 2


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(start: Start, run: Run, plan: RankPlan) -> None:
    service = start(FAKE_RANK_PLAN="stubborn")
    service.submit(run)
    wait_until(plan.is_at_work)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(timeout=20) == 0
    assert not is_alive(plan.pids()[0])


def test_sigterm_ends_a_service_that_waits_for_room_in_redis_and_its_run_stays_as_it_is(
    start: Start, run: Run, plan: RankPlan, environment: dict[str, str]
) -> None:
    service = start(FAKE_RANK_PLAN="stubborn", HEADRACE_MAX_RESTARTS_WITHOUT_PROGRESS="0")
    run_id = service.submit(run)
    wait_until(plan.is_at_work)
    with redis.Redis.from_url(environment["HEADRACE_REDIS_URL"]) as admin:
        admin.config_set("maxmemory", "1kb")
        try:
            os.kill(plan.pids()[0], signal.SIGKILL)
            wait_until(lambda: "waits until Redis has room" in service.log())  # to write that the run failed
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(timeout=60) == 0
            assert cast("Any", admin).hget(RunKeys(run_id).run, "status") == b"running"
        finally:
            admin.config_set("maxmemory", "0")
    assert "Traceback" not in service.log()


def test_kill_9_of_the_service_takes_its_rank_along_and_the_next_start_resumes_the_run(
    start: Start, run: Run, plan: RankPlan
) -> None:
    first = start(FAKE_RANK_PLAN="stubborn finish")
    run_id = first.submit(run)
    wait_until(plan.is_at_work)
    first.process.kill()
    first.process.wait(timeout=20)
    wait_until(lambda: not is_alive(plan.pids()[0]), timeout_s=5)

    second = start(FAKE_RANK_PLAN="stubborn finish")
    wait_until(lambda: second.status(run_id) == "finished")


def test_kill_9_of_the_rank_starts_it_again(start: Start, run: Run, plan: RankPlan) -> None:
    service = start(FAKE_RANK_PLAN="stubborn finish")
    run_id = service.submit(run)
    wait_until(plan.is_at_work)
    os.kill(plan.pids()[0], signal.SIGKILL)
    wait_until(lambda: service.status(run_id) == "finished")
    assert len(plan.pids()) == 2


def test_metrics_are_served_on_their_own_port(start: Start, run: Run, plan: RankPlan) -> None:
    port = free_port()
    service = start(HEADRACE_METRICS_PORT=str(port))
    service.submit(run)
    wait_until(plan.is_at_work)

    def shows_the_run() -> bool:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        return "headrace_rank_up 1.0" in text and 'headrace_runs{status="running"} 1.0' in text

    wait_until(shows_the_run)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"HEADRACE_PORT": "many"}, r"HEADRACE_PORT: .*valid integer"),
        ({"HEADRACE_HOST": "0.0.0.0"}, r"set HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY first"),
        ({"HEADRACE_RUNS_DIR": "runs"}, r"absolute path in HEADRACE_RUNS_DIR"),
        ({"HEADRACE_REWARDER_URL": "rewarder:8200"}, r"is no http:// or https:// address"),
        ({"HEADRACE_LOG_FORMAT": "xml"}, r"HEADRACE_LOG_FORMAT: .*'json' or 'text'"),
        ({"HEADRACE_RANK_CPUS": "[100000]"}, r"CPUs \[100000\], which this process may not use"),
    ],
)
def test_a_wrong_setting_is_a_sentence_and_exit_status_2(
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
    away = {"HEADRACE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0", "HEADRACE_REDIS_PATIENCE_S": "0.3"}
    status, said = end(environment | away)
    assert status == 1
    assert "Redis PING failed" in said


def test_a_password_that_redis_does_not_take_ends_it_at_once_with_status_2(environment: dict[str, str]) -> None:
    url = environment["HEADRACE_REDIS_URL"].replace("redis://", "redis://nobody:wrong@")
    status, said = end(environment | {"HEADRACE_REDIS_URL": url, "HEADRACE_REDIS_PATIENCE_S": "600"})
    assert status == 2
    assert "Redis does not take the user and password" in json.loads(said.splitlines()[-1])["message"]


def test_a_variable_that_nothing_reads_is_named_once(environment: dict[str, str]) -> None:
    _, said = end(environment | {"HEADRACE_METRIC_PORT": "9", "HEADRACE_LOG_FORMAT": "xml"})
    assert said.count("HEADRACE_METRIC_PORT is ignored") == 1


def test_who_waits_for_redis_answers_meanwhile_and_says_that_it_is_away(
    environment: dict[str, str], tmp_path: Path
) -> None:
    redis_port, metrics_port = free_port(), free_port()
    more = {
        "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_REDIS_PATIENCE_S": "600",
    }
    service = Service(environment | more, tmp_path / "service.log")

    def is_scraped() -> bool:
        assert service.process.poll() is None, service.log()
        with contextlib.suppress(httpx.TransportError):
            served = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False).text.splitlines()
            return "headrace_redis_up 0.0" in served and service.client.get("/livez").is_success
        return False

    try:
        wait_until(is_scraped)
        assert [service.client.get(path).status_code for path in ("/readyz", "/v1/about")] == [503, 200]
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=60) == 0
    finally:
        service.close()
    assert "Traceback" not in service.log()


def test_a_redis_that_throws_rollouts_away_is_a_sentence_and_exit_status_2(environment: dict[str, str]) -> None:
    with redis.Redis.from_url(environment["HEADRACE_REDIS_URL"]) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            status, said = end(environment)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert status == 2
    assert "Set maxmemory-policy noeviction" in said


def test_help_is_there_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'fastapi', 'redis', 'pydantic']))\n"
        "from services.trainer.__main__ import main\nmain(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "HEADRACE_REDIS_URL" in done.stdout


def test_the_rewarder_was_asked_with_the_key(start: Start, run: Run, rewarder: FakeRewarder) -> None:
    start().submit(run)
    assert rewarder.keys_seen == [f"Bearer {KEY}"]
