"""The HTTP client against a real HTTP server that misbehaves."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import client as client_module
from headrace.client import HeadraceApiError, HeadraceClient
from tests.headrace.scripted_api import HANG_UP, Answer, Asked, event_stream, problem, serving

RUN = {"run_id": "run-a", "status": "running"}
SUBMITTED = {"valid": True, "warnings": ["each prompt is used up to 3 times"], "derived": {"steps": 5}, "run": RUN}


def refusal_of(call: Callable[[], object]) -> HeadraceApiError:
    """Return the error that a call must end with."""
    with pytest.raises(HeadraceApiError) as refusal:
        call()
    return refusal.value


def test_a_submit_carries_the_key_and_returns_the_run_and_what_may_surprise() -> None:
    with serving(lambda _: SUBMITTED) as api, HeadraceClient(api.url, "secret") as client:
        submission = client.submit({"model": "m"})
    assert (submission.run_id, submission.warnings) == ("run-a", ("each prompt is used up to 3 times",))
    (asked,) = api.asked
    assert (asked.method, asked.path, asked.body) == ("POST", "/v1/runs", {"model": "m"})
    assert asked.headers["authorization"] == "Bearer secret"


def test_a_submit_whose_answer_was_lost_is_sent_again_under_the_same_idempotency_key() -> None:
    answers = iter([HANG_UP, SUBMITTED])
    with serving(lambda _: next(answers)) as api, HeadraceClient(api.url, "k") as client:
        assert client.submit({"model": "m"}).run_id == "run-a"
    first, second = (asked.headers["idempotency-key"] for asked in api.asked)
    assert first == second


def test_a_submit_whose_first_request_is_still_being_answered_waits_for_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_ASK_AGAIN_S", 0.01)
    in_flight = problem(409, "Send it again in a few seconds.", kind="request-in-flight")
    answers = iter([HANG_UP, *[in_flight] * 5, SUBMITTED])
    with serving(lambda _: next(answers)) as api, HeadraceClient(api.url, "k", timeout_s=60) as client:
        assert client.submit({"model": "m"}).run_id == "run-a"
    assert len({asked.headers["idempotency-key"] for asked in api.asked}) == 1
    with serving(lambda _: in_flight) as api, HeadraceClient(api.url, "k", submit_timeout_s=0.5) as client:
        assert refusal_of(lambda: client.submit({"model": "m"})).status == 409
    assert len(api.asked) > 1
    ambiguous = problem(409, "Several runs fit.")
    with serving(lambda _: ambiguous) as api, HeadraceClient(api.url, "k") as client:
        assert refusal_of(lambda: client.submit({"model": "m"})).status == 409
    assert len(api.asked) == 1


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_submit_that_a_proxy_gave_up_is_sent_again_under_the_same_idempotency_key(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(client_module, "_ASK_AGAIN_S", 0.01)
    gave_up = Answer(status=status, body=b"<html>the upstream is slow</html>", content_type="text/html")
    in_flight = problem(409, "Send it again in a few seconds.", kind="request-in-flight")
    answers = iter([gave_up, in_flight, gave_up, SUBMITTED])
    with serving(lambda _: next(answers)) as api, HeadraceClient(api.url, "k", timeout_s=60) as client:
        assert client.submit({"model": "m"}).run_id == "run-a"
    assert len(api.asked) == 4
    assert len({asked.headers["idempotency-key"] for asked in api.asked}) == 1


def test_a_proxy_that_gives_up_for_ever_and_a_trainer_that_refuses_end_a_submit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_ASK_AGAIN_S", 0.01)
    gave_up = Answer(status=504, body=b'{"message": "the upstream is slow"}')
    with serving(lambda _: gave_up) as api, HeadraceClient(api.url, "k", submit_timeout_s=0.5) as client:
        assert refusal_of(lambda: client.submit({"model": "m"})).status == 504
    assert len(api.asked) > 1
    refused = problem(503, "Redis does not answer.")
    with serving(lambda _: refused) as api, HeadraceClient(api.url, "k") as client:
        assert refusal_of(lambda: client.submit({"model": "m"})).status == 503
    assert len(api.asked) == 1


def test_two_submits_have_two_idempotency_keys() -> None:
    with serving(lambda _: SUBMITTED) as api, HeadraceClient(api.url, "k") as client:
        client.submit({"model": "m"})
        client.submit({"model": "m"})
    assert len({asked.headers["idempotency-key"] for asked in api.asked}) == 2


def test_a_check_makes_no_run() -> None:
    checked = SUBMITTED | {"run": None}
    with serving(lambda _: checked) as api, HeadraceClient(api.url, "k") as client:
        submission = client.check({"model": "m"})
    assert api.asked[0].path == "/v1/runs?dry_run=true"
    assert submission.derived == {"steps": 5}
    with pytest.raises(HeadraceApiError, match="only checked"):
        _ = submission.run_id


def test_a_refusal_is_its_detail_and_keeps_status_and_problem() -> None:
    refused = problem(422, "learning_rat: did you mean learning_rate?")
    with serving(lambda _: refused) as api, HeadraceClient(api.url, "k") as client:
        refusal = refusal_of(lambda: client.submit({}))
    assert str(refusal) == "learning_rat: did you mean learning_rate?"
    assert refusal.status == 422
    assert refusal.problem["title"] == "X"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=502, body=b"<html>bad gateway</html>", content_type="text/html"),
        Answer(body=b"<html>"),
        Answer(body=b"[1]"),
    ],
)
def test_a_server_that_is_not_headrace_is_reported_as_such(answer: Answer) -> None:
    with serving(lambda _: answer) as api, HeadraceClient(api.url, "k") as client:
        assert "like a headrace run API" in str(refusal_of(lambda: client.get("run-a")))


def test_an_api_that_is_not_there_is_named_with_what_to_do() -> None:
    with serving(lambda _: RUN) as api:
        url = api.url
    with HeadraceClient(url, "k") as client, pytest.raises(HeadraceApiError, match="is `headrace up` running") as away:
        client.get("run-a")
    assert url in str(away.value)
    assert away.value.status is None


def test_events_of_another_server_are_given_up_at_once() -> None:
    with serving(lambda _: Answer(200, b"<html>")) as api, HeadraceClient(api.url, "k") as client:
        assert "does not answer like a headrace run API" in str(refusal_of(lambda: [*client.events("run-a")]))
        assert len(api.asked) == 1


def test_an_api_that_does_not_answer_is_given_up() -> None:
    finished = threading.Event()

    def hang(_: Asked) -> Any:
        finished.wait(120)
        return RUN

    with serving(hang) as api, HeadraceClient(api.url, "k", timeout_s=1.0) as client:
        assert "does not answer within 1 s; `headrace doctor` says more" in str(refusal_of(lambda: client.get("run-a")))
        finished.set()


def test_only_a_submit_and_a_check_are_given_long_and_not_before_the_api_was_heard() -> None:
    finished = threading.Event()

    def hang(asked: Asked) -> Any:
        if asked.method == "GET":
            finished.wait(120)
        return SUBMITTED

    with (
        serving(hang) as api,
        HeadraceClient(api.url, "k", timeout_s=3.0, submit_timeout_s=60) as client,
        client.another() as other,
    ):
        for call in (client.list, client.wait_until_heard, other.list):
            assert "within 3 s" in str(refusal_of(call))
        finished.set()
        client.wait_until_heard()
    assert [asked.path for asked in api.asked][-1] == "/livez"


def test_a_submit_and_a_check_may_take_longer_than_other_answers() -> None:
    gone = threading.Event()

    def slow(asked: Asked) -> Any:
        if asked.method == "POST":
            gone.wait(4)
        return SUBMITTED

    with (
        serving(slow) as api,
        HeadraceClient(api.url, "k", timeout_s=3.0, submit_timeout_s=60) as client,
    ):
        assert client.submit({}).run_id == client.check({}).run_id == "run-a"
    assert len(api.asked) == 2


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving(lambda _: RUN) as api, HeadraceClient(api.url, "k") as client:
        assert client.get("run-a") == RUN


def test_all_pages_are_fetched() -> None:
    pages: dict[str, Any] = {
        "/v1/runs": {"runs": [{"run_id": "b"}], "next_cursor": "x y"},
        "/v1/runs?cursor=x+y": {"runs": [{"run_id": "a"}], "next_cursor": None},
        "/v1/runs?status=queued&status=running&name=first": {"runs": [{"run_id": "a"}], "next_cursor": None},
        "/v1/runs/run-a/metrics": {"metrics": [{"step": 1}, {"step": 2}], "next_cursor": "2"},
        "/v1/runs/run-a/metrics?cursor=2": {"metrics": [{"step": 3}], "next_cursor": None},
        "/v1/runs/run-a/rollouts": {"step": 7, "rollouts": [{"n": 0}], "next_cursor": "7-1"},
        "/v1/runs/run-a/rollouts?cursor=7-1": {"step": 7, "rollouts": [{"n": 1}], "next_cursor": None},
        "/v1/runs/run-a/rollouts?step=3": {"step": 3, "rollouts": [], "next_cursor": None},
    }
    with serving(lambda asked: pages[asked.path]) as api, HeadraceClient(api.url, "k") as client:
        assert [run["run_id"] for run in client.list()] == ["b", "a"]
        assert [run["run_id"] for run in client.list(status=("queued", "running"), name="first")] == ["a"]
        assert [row["step"] for row in client.metrics("run-a")] == [1, 2, 3]
        assert [row["n"] for row in client.rollouts("run-a")] == [0, 1]
        assert client.rollouts("run-a", step=3) == []


def test_a_run_id_cannot_reach_another_path() -> None:
    with serving(lambda _: RUN) as api, HeadraceClient(api.url, "k") as client:
        client.get("../../metrics?x=1")
    assert api.asked[0].path == "/v1/runs/..%2F..%2Fmetrics%3Fx%3D1"


def test_events_go_on_after_the_last_one_when_the_stream_breaks_off() -> None:
    streams = {
        None: event_stream(("5-0", "metrics", {"step": 1}), ("6-0", "push", {"policy_version": 1})),
        "6-0": event_stream(("7-0", "metrics", {"step": 2}), ("", "status", {"status": "finished", "final": True})),
    }

    def script(asked: Asked) -> Any:
        return streams[asked.headers.get("last-event-id")] if asked.path.endswith("/events") else RUN

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        events = list(client.events("run-a"))
    assert [(event.id, event.kind) for event in events] == [
        ("5-0", "metrics"),
        ("6-0", "push"),
        ("7-0", "metrics"),
        ("", "status"),
    ]
    assert events[2].data == {"step": 2}


def test_events_end_when_the_run_has_ended_even_if_the_last_event_was_lost() -> None:
    def script(asked: Asked) -> Any:
        is_stream = asked.path.endswith("/events")
        return event_stream(("5-0", "metrics", {"step": 1})) if is_stream else RUN | {"status": "failed"}

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        assert [event.id for event in client.events("run-a")] == ["5-0"]


def test_events_survive_an_api_that_is_started_again() -> None:
    answers = iter(
        [
            RUN,
            event_stream(("5-0", "metrics", {"step": 1})),
            HANG_UP,
            problem(503, "Redis is away"),
            RUN,
            event_stream(("", "status", {"status": "finished", "final": True})),
        ]
    )
    with serving(lambda _: next(answers)) as api, HeadraceClient(api.url, "k") as client:
        assert [event.kind for event in client.events("run-a")] == ["metrics", "status"]


def test_patience_with_an_api_that_is_away_begins_when_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream was silent for 100 s, and the consumer then took 100 s for an event."""
    now_s = [0.0]
    monkeypatch.setattr("headrace.client.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    answers = iter(
        [
            *(RUN, event_stream(), HANG_UP, HANG_UP),
            *(RUN, event_stream(("5-0", "metrics", {"step": 1})), HANG_UP),
            *(RUN, event_stream(("", "status", {"status": "finished", "final": True}))),
        ]
    )

    def script(_: Asked) -> Any:
        answer = next(answers)
        now_s[0] += 0.0 if answer is HANG_UP else 100.0
        return answer

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        seen = [event.kind for event in client.events("run-a")]
    assert seen == ["metrics", "status"]


def test_a_stream_that_is_never_opened_is_given_up_although_the_run_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("headrace.client.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def script(asked: Asked) -> Any:
        now_s[0] += 20.0
        return problem(503, "no streams here") if asked.path.endswith("/events") else RUN

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        assert str(refusal_of(lambda: next(client.events("run-a")))) == "no streams here"
    assert len(api.asked) == 6, "at 40, 80 and 120 s"


def test_events_of_a_run_that_is_named_are_those_of_one_run_after_a_reconnect_too() -> None:
    """The run has ended while the stream was broken, and another run of its name has been submitted."""

    def script(asked: Asked) -> Any:
        if not asked.path.endswith("/events"):
            is_another = asked.path.endswith("/first") and len(api.asked) > 1
            return RUN | {"run_id": "run-b" if is_another else "run-a"}
        is_first = len(api.asked) == 2
        return event_stream(("5-0", "metrics", {})) if is_first else event_stream(("", "status", {"final": True}))

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        assert [event.kind for event in client.events("first")] == ["metrics", "status"]
    streams = [asked.path for asked in api.asked if asked.path.endswith("/events")]
    assert streams == ["/v1/runs/run-a/events"] * 2


def test_events_of_a_run_that_does_not_exist_are_refused_at_once() -> None:
    with (
        serving(lambda _: problem(404, "There is no run with this id.")) as api,
        HeadraceClient(api.url, "k") as client,
        pytest.raises(HeadraceApiError, match="no run with this id"),
    ):
        next(client.events("run-a"))
    assert len(api.asked) == 1


def test_events_are_given_up_when_the_api_stays_away() -> None:
    with serving(lambda _: RUN) as api:
        url = api.url
    with HeadraceClient(url, "k") as client, pytest.raises(HeadraceApiError, match="cannot be reached"):
        next(client.events("run-a", patience_s=0.1))


def test_events_that_are_not_json_are_skipped() -> None:
    text = b'event: metrics\ndata: {\n\ndata: [1]\n\nid: 9-0\nevent: status\ndata: {\ndata: "final": true}\n\n'
    with (
        serving(lambda asked: Answer(body=text) if asked.path.endswith("/events") else RUN) as api,
        HeadraceClient(api.url, "k") as client,
    ):
        assert [(event.id, event.data) for event in client.events("run-a")] == [("9-0", {"final": True})]


@pytest.mark.parametrize(
    ("path", "sha256", "says"),
    [("../../.bashrc", "0" * 64, r"'\.\.'"), ("/etc/cron.d/x", "0" * 64, "relative"), ("x", "../x", "is not a hash")],
)
def test_a_server_cannot_name_files_outside_the_directory_of_a_download(
    path: str, sha256: str, says: str, tmp_path: Path
) -> None:
    listed = {"run_id": "run-a", "files": [{"path": path, "size": 1, "sha256": sha256}]}
    with serving(lambda _: listed) as api, HeadraceClient(api.url, "k") as client:
        assert re.search(says, str(refusal_of(lambda: client.download_model("run-a", tmp_path / "model"))))
    assert len(api.asked) == 1
    assert not any(tmp_path.iterdir())
