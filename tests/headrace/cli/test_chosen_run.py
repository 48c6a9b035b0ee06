"""Commands without a run id choose the training run, even if a newer one is queued, and print which one they chose."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli
from tests.headrace.launcher_rig import local_service
from tests.headrace.scripted_api import Answer, Asked, problem, serving

pytestmark = pytest.mark.unit

Runs = list[dict[str, Any]]


def a_run(run_id: str, status: str, *, desired: str = "run", started_at_s: float | None = None) -> dict[str, Any]:
    has_begun = status not in ("queued", "stopped")
    return {
        "run_id": run_id,
        "status": status,
        "desired": desired,
        "reason": "",
        "run_dir": f"/runs/{run_id}",
        "created_at_s": 1.0,
        "started_at_s": 2.0 if has_begun else started_at_s,
        "ended_at_s": None,
        "progress": {"step": 1, "max_steps": 2},
        "config": {},
    }


ENDED_LAST = [a_run("never-begun", "stopped"), a_run("ended", "finished")]
WITH_QUEUE = [a_run("queued-2", "queued"), a_run("queued-1", "queued"), a_run("ended", "finished")]
TRAINING = [*WITH_QUEUE[:2], a_run("training", "running"), WITH_QUEUE[2]]
PAUSED = [*WITH_QUEUE[:2], a_run("paused", "paused", desired="pause"), WITH_QUEUE[2]]
HELD_BACK = [a_run("held-2", "queued", desired="pause"), a_run("held-1", "queued", desired="pause"), *TRAINING]
PAUSING = [*WITH_QUEUE[:2], a_run("pausing", "running", desired="pause"), WITH_QUEUE[2]]


@pytest.mark.parametrize(
    ("command", "runs", "taken", "what"),
    [
        ("show", TRAINING, "training", "the training run"),
        ("show", PAUSED, "paused", "the paused run"),
        ("show", WITH_QUEUE[1:], "queued-1", "the queued run"),
        ("show", ENDED_LAST, "never-begun", "the newest run"),
        ("watch", TRAINING, "training", "the training run"),
        ("pause", TRAINING, "training", "the training run"),
        ("pause", HELD_BACK, "training", "the training run"),
        ("pause", PAUSED, "paused", "the paused run"),
        ("stop", TRAINING, "training", "the training run"),
        ("stop", PAUSED, "paused", "the paused run"),
        ("resume", PAUSED, "paused", "the paused run"),
        ("resume", PAUSING, "pausing", "the run that is about to pause"),
        ("resume", HELD_BACK[1:], "held-1", "the paused run in the queue"),
        ("resume", TRAINING, "training", "the training run"),
        ("rollouts", TRAINING, "training", "the training run"),
        ("rollouts", WITH_QUEUE, "ended", "the newest run that has begun"),
        ("rollouts", ENDED_LAST, "ended", "the newest run that has begun"),
    ],
)
def test_a_command_without_a_run_takes_the_one_it_is_for_and_says_which(
    command: str,
    runs: Runs,
    taken: str,
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(asked: Asked) -> Any:
        path = asked.path.partition("?")[0]
        if path == "/v1/runs":
            return {"runs": runs, "next_cursor": None}
        of_taken = path.removeprefix(f"/v1/runs/{taken}")
        if of_taken == path:
            return problem(418, f"another run than {taken} was asked for: {path}")
        if of_taken == "/evaluations":
            return {"evaluations": [], "next_cursor": None}
        if of_taken == "/metrics":
            return {"metrics": [], "next_after_step": None}
        if of_taken == "/rollouts":
            return {"rollouts": [], "step": 1, "next_offset": None}
        run = next(run for run in runs if run["run_id"] == taken)
        # A watching user has already seen the end.
        return run | ({"status": "finished"} if command == "watch" else {})

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main([command, "--url", api.url]) == 0
    assert capsys.readouterr().err == f"{taken}: {what}\n"
    assert any(asked.path.startswith(f"/v1/runs/{taken}") for asked in api.asked)


@pytest.mark.parametrize("command", ["pause", "stop"])
def test_a_run_that_has_not_begun_is_paused_and_stopped_by_name_only(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second, impatient `stop` arrives when the training run has ended. It must not stop the next run for good."""
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda asked: {"runs": WITH_QUEUE[:2], "next_cursor": None}) as api:
        assert cli.main([command, "--url", api.url]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"headrace: no run is training, and 2 are queued; name the run: headrace {command} RUN"
    assert [line.split()[0] for line in said[1:]] == ["queued-2", "queued-1"]
    assert {asked.path.partition("?")[0] for asked in api.asked} == {"/v1/runs"}


def test_a_refusal_of_local_services_that_are_there_does_not_name_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_URL", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with serving(lambda asked: {"runs": WITH_QUEUE[:2], "next_cursor": None}) as api:
        state = local_service(tmp_path / ".headrace", api.url)
        (state.runs / "queued-1").mkdir(parents=True)
        (state.runs / "queued-1" / "config.json").write_text("{}")
        assert cli.main(["stop"]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].split()[0] == "queued-1"
    assert "from their files" not in said
    assert cli.main(["stop"]) == 1
    said = capsys.readouterr().err
    assert f"read its runs from their files with `headrace runs {state.runs}`" in said


def test_one_queued_run_is_not_stopped_unless_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda asked: {"runs": WITH_QUEUE[1:2], "next_cursor": None}) as api:
        assert cli.main(["stop", "--url", api.url]) == 1
    assert "no run is training, and 1 is queued; name the run: headrace stop RUN" in capsys.readouterr().err


class _Typed(io.StringIO):
    """The input of a user at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (WITH_QUEUE, "no run is training, and 2 are queued:"),
        ([a_run("b", "running"), a_run("a", "running"), *WITH_QUEUE], "2 are running:"),
    ],
)
def test_a_user_at_a_terminal_chooses_from_a_list(
    runs: Runs, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(asked: Asked) -> Any:
        if asked.method == "POST":
            return a_run(asked.path.split("/")[3], "queued", desired="pause")
        return {"runs": runs, "next_cursor": None}

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    monkeypatch.setattr("sys.stdin", _Typed("2\n"))
    with serving(script) as api:
        assert cli.main(["pause", "--url", api.url]) == 0
    second = runs[1]["run_id"]
    said = capsys.readouterr().err
    assert said.startswith(says)
    assert f"  2  {second}  " in said
    assert said.endswith(f"which run? [1-2] {second}: chosen\n")
    assert api.asked[-1].path == f"/v1/runs/{second}/pause"


@pytest.mark.parametrize("typed", ["", "\n", "0\n", "3\n", "queued-1\n"])
def test_an_answer_that_is_not_on_the_list_chooses_no_run(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    monkeypatch.setattr("sys.stdin", _Typed(typed))
    with serving(lambda asked: {"runs": WITH_QUEUE, "next_cursor": None}) as api:
        assert cli.main(["stop", "--url", api.url]) == 1
    assert capsys.readouterr().err.endswith("headrace: no run was chosen\n")
    assert all(asked.method == "GET" for asked in api.asked)


def test_the_run_that_trains_is_found_behind_a_page_of_queued_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = [a_run(f"queued-{number}", "queued") for number in range(100)]

    def script(asked: Asked) -> Any:
        if asked.path == "/v1/runs/training/pause":
            return a_run("training", "running", desired="pause")
        is_second = "cursor=next" in asked.path
        return {
            "runs": [a_run("training", "running")] if is_second else queued,
            "next_cursor": None if is_second else "next",
        }

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["pause", "--url", api.url]) == 0
    said = capsys.readouterr()
    assert said.err == "training: the training run\n"
    assert said.out.startswith("training pauses")


def test_a_run_that_is_named_is_taken_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda _: a_run("queued-2", "queued", desired="pause")) as api:
        assert cli.main(["pause", "queued-2", "--url", api.url]) == 0
    assert capsys.readouterr().err == ""
    assert [asked.path for asked in api.asked] == ["/v1/runs/queued-2/pause"]


@pytest.mark.parametrize("name", ["gsm", "run-3"])
def test_of_ended_runs_of_one_name_the_newest_is_read_and_none_is_changed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [a_run("run-new", "stopped") | {"name": name}, a_run("run-old", "finished") | {"name": name}]

    def script(asked: Asked) -> Any:
        if asked.path in ("/v1/runs/run-new", "/v1/runs/run-old"):
            return next(run for run in same if asked.path.endswith(run["run_id"]))
        about = {"type": "/problems/ambiguous-run", "run_id": name, "candidates": same}
        return Answer(status=409, body=json.dumps(about).encode(), content_type="application/problem+json")

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["show", name, "--json", "--url", api.url]) == 0
        shown = capsys.readouterr()
        assert f"run-new ({name}): the newest run of this name" in shown.err
        assert "run-new" in shown.out
        assert cli.main(["stop", name, "--url", api.url]) == 1
    assert f"several runs fit {name}" in capsys.readouterr().err
