"""The process ``python -m services.trainer``: it answers at once, and leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import httpx
import redis

from shared.redis.keys import RunKeys
from tests.conftest import RedisServer
from tests.kept_ports import kept_port
from tests.trainer.api_rig import KEY, FakeRewarder
from tests.trainer.rank_rig import RankPlan, is_alive
from tests.trainer.service_rig import ROOT, Run, Service, Start, wait_until


def test_sigterm_ends_streams_and_rank_and_the_run_goes_on_at_the_next_start(
    start: Start, run: Run, plan: RankPlan
) -> None:
    first = start()
    run_id = first.submit(run)
    wait_until(plan.is_at_work)
    with first.client.stream("GET", f"/v1/runs/{run_id}/events") as watched:
        first.process.send_signal(signal.SIGTERM)
        assert [line for line in watched.iter_lines() if line.startswith("event")] == []
    assert first.process.wait(timeout=120) == 0
    assert not is_alive(plan.pids()[0])
    assert "Traceback" not in first.log()

    second = start()
    wait_until(lambda: second.status(run_id) == "finished")
    assert len(plan.pids()) == 2


def test_no_child_of_a_trainer_has_a_key_or_a_password_and_the_rank_works(
    start: Start, run: Run, plan: RankPlan, environment: dict[str, str]
) -> None:
    service = start(HEADRACE_INTERNAL_KEY="canary-of-services", HEADRACE_HOST="127.0.0.1")
    service.submit(run)
    wait_until(plan.is_at_work)
    (pid,) = plan.pids()
    seen = Path(f"/proc/{pid}/environ").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
    found = (line.partition("=") for line in seen.split("\0"))
    variables = {name: value for name, _, value in found}
    assert KEY not in seen
    assert "canary" not in seen
    assert Path(variables["HEADRACE_INTERNAL_KEY_FILE"]).read_text() == "canary-of-services", "it has the key to use"
    assert variables["HEADRACE_REDIS_URL"] == environment["HEADRACE_REDIS_URL"]


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(start: Start, run: Run, plan: RankPlan) -> None:
    service = start(FAKE_RANK_PLAN="stubborn")
    service.submit(run)
    wait_until(plan.is_at_work)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(timeout=120) == 0
    assert not is_alive(plan.pids()[0])


def takes_writes(server: redis.Redis) -> bool:
    try:
        server.set("filler", "x" * 64)
    except redis.RedisError:  # its file cannot grow
        return False
    return True


def test_sigterm_ends_a_service_that_waits_for_room_in_redis_and_its_run_stays_as_it_is(
    start: Start, run: Run, plan: RankPlan, redis_server: RedisServer, environment: dict[str, str]
) -> None:
    service = start(FAKE_RANK_PLAN="stubborn", HEADRACE_MAX_RESTARTS_WITHOUT_PROGRESS="0")
    run_id = service.submit(run)
    wait_until(plan.is_at_work)
    with redis.Redis.from_url(environment["HEADRACE_REDIS_URL"]) as admin:
        redis_server.fill_disk()
        try:
            wait_until(lambda: not takes_writes(admin))
            os.kill(plan.pids()[0], signal.SIGKILL)
            wait_until(lambda: "waits until Redis has room" in service.log())  # to record that the run failed
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(timeout=120) == 0
            assert cast("Any", admin).hget(RunKeys(run_id).run, "status") == b"running"
        finally:
            redis_server.free_disk()
            wait_until(lambda: takes_writes(admin))
    assert "Traceback" not in service.log()


def test_kill_9_of_the_service_takes_its_rank_along_and_the_next_start_resumes_the_run(
    start: Start, run: Run, plan: RankPlan
) -> None:
    first = start(FAKE_RANK_PLAN="stubborn finish")
    run_id = first.submit(run)
    wait_until(plan.is_at_work)
    first.process.kill()
    first.process.wait(timeout=120)
    wait_until(lambda: not is_alive(plan.pids()[0]))

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
    port = kept_port()
    service = start(HEADRACE_METRICS_PORT=str(port))
    service.submit(run)
    wait_until(plan.is_at_work)

    def shows_the_run() -> bool:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=120).text
        return "headrace_rank_up 1.0" in text and 'headrace_runs{status="running"} 1.0' in text

    wait_until(shows_the_run)


def test_a_service_that_waits_for_redis_answers_and_says_that_redis_is_unreachable(
    environment: dict[str, str], tmp_path: Path
) -> None:
    redis_port, metrics_port = kept_port(), kept_port()
    more = {
        "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_REDIS_PATIENCE_S": "600",
    }
    service = Service(environment | more, tmp_path / "service.log")

    def is_scraped() -> bool:
        assert service.process.poll() is None, service.log()
        with contextlib.suppress(httpx.TransportError):
            served = httpx.get(
                f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False, timeout=120
            ).text.splitlines()
            return "headrace_redis_up 0.0" in served and service.client.get("/livez").is_success
        return False

    try:
        wait_until(is_scraped)
        assert [service.client.get(path).status_code for path in ("/readyz", "/v1/about")] == [503, 200]
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(timeout=120) == 0
    finally:
        service.close()
    assert "Traceback" not in service.log()


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'fastapi', 'redis', 'pydantic']))\n"
        "from services.trainer.__main__ import main\nmain(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert "HEADRACE_REDIS_URL" in done.stdout


def test_the_rewarder_was_asked_with_the_key(start: Start, run: Run, rewarder: FakeRewarder) -> None:
    start().submit(run)
    assert rewarder.keys_seen == [f"Bearer {KEY}"]
