"""What `runs`, `show`, `rollouts` and `edit` print and send: whole ids, JSON, orders, one run under any name."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import command_line as cli
from headrace.cli.run_table import table_of
from tests.headrace.scripted_api import Answer, Asked, serving

pytestmark = pytest.mark.unit

ID = "run-bqwentcjiwbvqfzwy7cu3iw6bq"
RUN: dict[str, Any] = {
    "run_id": ID,
    "name": "a-name-of-forty-characters-and-some-more",
    "tags": ["sweep", "lr:1e-4"],
    "metadata": {"who": "ada"},
    "status": "running",
    "desired": "run",
    "reason": "",
    "created_at_s": 10.0,
    "started_at_s": 20.0,
    "ended_at_s": None,
    "run_dir": "/runs/a",
    "progress": {"step": 100, "max_steps": 2000, "groups_trained": 12_345, "groups_dropped": {"stale": 10_000}},
    "config": {},
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_of_runs_fits_and_cuts_no_id(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table_of([RUN, RUN | {"name": None, "tags": []}], width=width))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.startswith("run-")] == [ID, ID]
    assert "running" in lines[2]
    names = "".join(line[len(ID) :].split()[0] for line in lines[2:-1])
    assert names == RUN["name"]


def test_columns_that_have_no_room_are_left_out_and_ids_and_starts_are_kept() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table_of([RUN | {"tags": [], "name": "short"}], width=80))
    assert capture.get().split("\n")[0].split() == ["run", "name", "status", "step", "started"]


def test_the_table_says_which_run_continues_another() -> None:
    beginning = {"run_id": ID, "run_name": "math", "step": 60, "steps_before": 60}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table_of([RUN | {"tags": [], "name": "math-2", "beginning": beginning}], width=80))
    heads, _, row = capture.get().splitlines()
    assert heads.replace("began from", "from").split() == ["run", "name", "status", "step", "from"]
    assert row.split() == [ID, "math-2", "running", "100/2000", "math:60"]


def test_runs_are_printed_as_one_json_document_with_the_keys_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [{"runs": [RUN], "next_cursor": "next"}, {"runs": [RUN], "next_cursor": None}]
    with serving(lambda asked: pages["cursor" in asked.path]) as api:
        assert cli.main(["runs", "--json", "--tag", "sweep", "--tag", "b", "--url", api.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [RUN, RUN]}
    assert api.asked[0].path == "/v1/runs?tag=sweep&tag=b"


@pytest.mark.parametrize(
    ("options", "asked", "order"),
    [
        ([], "/v1/runs", ["c", "b"]),
        (["--reverse"], "/v1/runs", ["b", "c"]),
        (["--sort", "name"], "/v1/runs?sort=name", ["c", "b"]),
        (["--sort", "step", "--reverse"], "/v1/runs?sort=step", ["b", "c"]),
    ],
)
def test_runs_are_sorted_by_the_api(
    options: list[str], asked: str, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [RUN | {"run_id": "c"}, RUN | {"run_id": "b"}]
    with serving(lambda _: {"runs": runs, "next_cursor": None}) as api:
        assert cli.main(["runs", "--json", *options, "--url", api.url]) == 0
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)["runs"]] == order
    assert api.asked[0].path == asked


@pytest.mark.parametrize("options", [["--json"], ["--sort", "name"], ["--reverse"]])
def test_runs_in_a_directory_take_no_options(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", str(tmp_path), *options]) == 1
    assert "with DIR, runs are only listed: leave out the other options" in capsys.readouterr().err


def test_a_run_is_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _: RUN) as api:
        assert cli.main(["show", "first", "--json", "--url", api.url]) == 0
    assert json.loads(capsys.readouterr().out) == RUN
    assert {asked.path for asked in api.asked} == {"/v1/runs/first"}


def test_a_run_that_is_shown_by_its_name_is_shown_with_its_whole_id_tags_and_metadata(
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty: dict[str, Any] = {"metrics": [], "evaluations": [], "next_cursor": None}
    with serving(lambda asked: RUN if asked.path.endswith("/first") else empty) as api:
        assert cli.main(["show", "first", "--url", api.url]) == 0
    said = capsys.readouterr().out
    assert ID in said.splitlines()[0]
    assert said.endswith("who: ada\ntags: sweep lr:1e-4\ndirectory: /runs/a\n")
    assert api.asked[-1].path == f"/v1/runs/{ID}/evaluations"


def test_rollouts_are_printed_as_json_with_the_id_of_their_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": 3, "prompt": "1+1=", "completion": "2"}, {"step": 3, "prompt": "2+2=", "completion": "4"}]
    with serving(lambda asked: {"rollouts": rows, "next_cursor": None} if "rollouts" in asked.path else RUN) as api:
        assert cli.main(["rollouts", "first", "--json", "--limit", "1", "--url", api.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": ID, "step": 3, "rollouts": rows[:1]}


def test_a_name_that_several_runs_have_is_refused_with_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [{key: RUN[key] for key in ("run_id", "status", "created_at_s", "started_at_s")} | {"name": "again"}]
    body = {"type": "/problems/ambiguous-run", "title": "Ambiguous run", "status": 409, "run_id": "again"}
    answer = Answer(409, json.dumps({**body, "detail": "...", "candidates": candidates}).encode())
    with serving(lambda _: answer) as api:
        assert cli.main(["stop", "again", "--url", api.url]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "headrace: several runs fit again; use the id of one:"
    assert said[1].split()[:4] == [ID, "again", "running", "started"]


def test_a_run_is_edited_under_the_name_that_the_user_gave(capsys: pytest.CaptureFixture[str]) -> None:
    def script(asked: Asked) -> Any:
        return RUN | {"config": asked.body} if asked.method == "PATCH" else RUN

    options = ["--name", "", "--add-tag", "best", "--remove-tag", "sweep"]
    for entry in ("lr=1e-4", "seed=3", "who=", "day=2026-11-26", "kept=yes", "is=a=b", "top=nan"):
        options += ["--metadata", entry]
    with serving(script) as api:
        assert cli.main(["edit", "first", *options, "--max-steps", "300", "--url", api.url]) == 0
    patch = api.asked[-1]
    assert (patch.method, patch.path) == ("PATCH", "/v1/runs/first")
    assert patch.body == {
        "name": None,
        "tags": ["lr:1e-4", "best"],
        "metadata": {
            "lr": 1e-4,
            "seed": 3,
            "who": None,
            "day": "2026-11-26",
            "kept": "yes",
            "is": "a=b",
            "top": "nan",
        },
        "max_steps": 300,
    }
    assert f"{ID} has tags: lr:1e-4 best\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "step", "jumps"),
    [("linear", 100, True), ("cosine", 100, True), ("constant", 100, False), ("linear", 0, False)],
)
def test_a_new_length_says_whether_the_learning_rate_jumps(
    capsys: pytest.CaptureFixture[str], schedule: str, step: int, jumps: bool
) -> None:
    run = RUN | {"config": {"lr_scheduler_type": schedule, "max_steps": 300}, "progress": {"step": step}}
    with serving(lambda _: run) as api:
        assert cli.main(["edit", ID, "--max-steps", "300", "--url", api.url]) == 0
    says = f"the learning rate jumps with its next batch: lr_scheduler_type {schedule} then goes on as in a run of 300"
    says += " steps"
    assert capsys.readouterr().out.splitlines() == [f"{ID} has max_steps: 300", *([says] if jumps else [])]


@pytest.mark.parametrize("entry", ["note", "=1"])
def test_metadata_that_is_not_a_name_and_a_value_is_refused(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["edit", "first", "--metadata", entry]) == 1
    assert "write NAME=VALUE, such as note=baseline" in capsys.readouterr().err


def test_an_edit_without_a_change_is_refused_before_a_service_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["edit", "first"]) == 1
    assert "nothing to change" in capsys.readouterr().err


def test_resuming_a_failed_run_says_why_it_had_failed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = RUN | {"status": "failed", "reason": "there is no metric nosuch"}
    with serving(lambda asked: failed if asked.method == "GET" else RUN | {"status": "queued"}) as api:
        assert cli.main(["resume", ID, "--url", api.url]) == 0
    assert capsys.readouterr().out == (
        f"{ID} continues from its newest checkpoint when it is its turn, with its present settings\n"
        "it had failed: there is no metric nosuch\n"
    )


@pytest.mark.parametrize(
    ("command", "status", "started_at_s", "says"),
    [
        ("pause", "queued", None, f"{ID} has not started, and will not start until `headrace resume {ID}`"),
        ("pause", "queued", 20.0, f"{ID} is queued, and will not go on until `headrace resume {ID}`"),
        ("stop", "stopped", None, f"{ID} had not started, and will not start: it is stopped"),
        ("stop", "stopped", 20.0, f"{ID} will not go on: it is stopped"),
    ],
)
def test_a_queued_run_that_had_failed_is_not_said_to_have_never_started(
    capsys: pytest.CaptureFixture[str], command: str, status: str, started_at_s: float | None, says: str
) -> None:
    def script(asked: Asked) -> Any:
        return RUN | {"started_at_s": started_at_s, "status": status if asked.path.endswith(command) else "queued"}

    with serving(script) as api:
        assert cli.main([command, ID, "--url", api.url]) == 0
    assert capsys.readouterr().out == f"{says}\n"
