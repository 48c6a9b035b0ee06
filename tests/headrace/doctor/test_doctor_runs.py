"""`headrace doctor` about runs."""

import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from headrace.doctor.examination import examine
from headrace.doctor.findings import FINE, PROBLEMS, exit_status
from tests.headrace.doctor.doctor_rig import ABOUT, level, service, targets, wrong
from tests.headrace.scripted_api import Asked, serving
from tests.kept_ports import kept_port


def run_page(**more: Any) -> dict[str, Any]:
    return {
        "run_id": "run-a", "status": "running", "waiting_for": None, "reason": "", "num_rewarders": 1,
        "num_sessions": None,
        "queues": {"dead_letters": 0}, "refusals": [],
        "generators": [{"replica_id": "generator-0", "is_alive": True, "doing": ""}], **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "check", "says"),
    [
        ({"queues": {"dead_letters": 3}}, "dead letters", "3 prompt groups"),
        ({"num_rewarders": 0}, "rewarders", "no rewarder is alive for it"),
        ({"num_sessions": 0}, "sessions", "it has tools, and no sessions replica plays it"),
        ({"generators": []}, "generators", "no generator is alive for it"),
        (
            {"generators": [*run_page()["generators"], {"replica_id": "g1", "is_alive": False, "doing": ""}]},
            "generators",
            "g1 took part, but its lease has expired",
        ),
        (
            {"refusals": [{"kind": "generator", "replica_id": "g1", "reason": "use auto or gloo"}]},
            "refusals",
            "use auto or gloo",
        ),
        ({"status": "paused", "reason": "judge failed", "pause": {"by": "rewards"}}, "run", "paused: judge failed"),
        (
            {
                "waiting_kind": "silent_rank",
                "waiting_for": "its training rank, which has not reported for more than 40 min; see rank.log",
            },
            "run",
            "has not reported for more than 40 min",
        ),
        (
            {
                "waiting_kind": "restarting",
                "waiting_for": "its training rank, which crashed with exit status 1 and is being restarted; "
                "it last said: CUDA out of memory",
            },
            "run",
            "CUDA out of memory",
        ),
        (
            {"waiting_kind": "push_failed", "waiting_for": "a generator: the push to generator-0 failed (timeout)"},
            "run",
            "the push to generator-0",
        ),
    ],
)
async def test_problems_of_a_run_are_reported(more: dict[str, Any], check: str, says: str) -> None:
    answers = {
        "/v1/runs": {"runs": [{"run_id": "run-a", "status": "running"}, {"run_id": "run-0", "status": "finished"}]},
        "/v1/runs/run-a": run_page(**more),
    }
    with service("trainer", answers) as api:
        found = await examine(targets(api_url=api.url))
        assert "/v1/runs/run-0" not in {one.path for one in api.asked}
    assert list(wrong(found)) == [("run-a", check)]
    assert says in wrong(found)["run-a", check]


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        ([], FINE),
        ([run_page()], FINE),
        ([run_page(status="queued", num_sessions=0)], PROBLEMS),
    ],
    ids=["no run", "a run without tools", "a run with tools"],
)
async def test_sessions_may_be_away_unless_a_run_needs_them(runs: list[dict[str, Any]], status: int) -> None:
    answers: dict[str, Any] = {"/v1/runs": {"runs": runs}} | {f"/v1/runs/{run['run_id']}": run for run in runs}
    with service("trainer", answers) as api, service("rewarder") as rewarder:
        away = f"http://127.0.0.1:{kept_port()}"
        found = await examine(targets(api_url=api.url, rewarder_urls=(rewarder.url,), sessions_urls=(away,)))
    assert level(found, "sessions", "reachable") == ("note" if status == FINE else "problem")
    assert exit_status(found.findings) == status


async def test_a_run_that_only_waits_is_fine_and_one_that_failed_lately_is_mentioned() -> None:
    page = run_page(waiting_for="3 of 8 groups", waiting_kind="work")
    ended = {"status": "failed", "reason": "no room", "ended_at_s": time.time() - 60}
    runs = [page, {"run_id": "run-f", **ended}, {"run_id": "run-old", **ended, "ended_at_s": 1.0}]
    with service("trainer", {"/v1/runs": {"runs": runs}, "/v1/runs/run-a": page}) as api:
        found = await examine(targets(api_url=api.url))
    assert wrong(found) == {}
    assert (level(found, "run-a", "run"), level(found, "run-f", "run")) == ("ok", "note")
    assert "run-old" not in {finding.where for finding in found.findings}


@pytest.mark.parametrize(("num_long", "expected"), [(0, "ok"), (500, "problem")])
async def test_a_thousand_runs_with_long_reasons_are_listed_in_pages(num_long: int, expected: str) -> None:
    runs: list[dict[str, Any]] = [
        {"run_id": f"run-{number}", "status": "finished", "reason": "x" * (100_000 if number < num_long else 10_000)}
        for number in range(1000)
    ]
    runs.reverse()
    runs[-1] |= {"status": "failed", "ended_at_s": time.time() - 60}

    def script(asked: Asked) -> Any:
        if asked.path in ("/livez", "/readyz"):
            return {}
        if not asked.path.startswith("/v1/runs"):
            return {"service": "trainer", **ABOUT}
        query = parse_qs(urlsplit(asked.path).query)
        first, num = int(query.get("cursor", ["0"])[0]), int(query["limit"][0])
        more = {"next_cursor": str(first + num)} if first + num < len(runs) else {}
        return {"runs": runs[first : first + num], **more}

    with serving(script) as api:
        found = await examine(targets(api_url=api.url))
    assert level(found, "runs", "list") == expected
    assert ("run-0" in {finding.where for finding in found.findings}) is (expected == "ok")


async def test_a_run_that_a_user_paused_is_not_a_problem() -> None:
    page = run_page(status="paused", reason="somebody asked for it", pause={"by": "user"})
    with service("trainer", {"/v1/runs": {"runs": [page]}, "/v1/runs/run-a": page}) as api:
        found = await examine(targets(api_url=api.url))
    assert wrong(found) == {}
    assert level(found, "run-a", "run") == "note"
