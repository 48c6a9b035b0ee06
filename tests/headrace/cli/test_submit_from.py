"""`headrace submit --from`: the settings that are sent, with and without a run file."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli
from tests.headrace.scripted_api import Answer, Asked, problem, serving

pytestmark = pytest.mark.unit

ID = "run-bqwentcjiwbvqfzwy7cu3iw6bq"
CONFIG: dict[str, Any] = {
    "name": "math",
    "model": "org/model",
    "dataset_name": "org/data",
    "reward_funcs": ["accuracy_reward"],
    "learning_rate": 1e-6,
    "num_train_epochs": 3.0,
    "max_steps": 100,
    "resume_from_checkpoint": "run-older",
    "resume_only_model": True,
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")


def script(asked: Asked, *, taken: tuple[str, ...] = ("math",)) -> Any:
    if asked.method == "POST":
        return {"warnings": [], "derived": {}, "run": {"run_id": "run-new"}}
    name = asked.path.rpartition("/")[2]
    if name in (ID, *taken):
        return {"run_id": ID, "name": "math" if name == ID else name, "status": "finished", "config": CONFIG}
    return problem(404, "No run has this id.") if "/runs/" in asked.path else {}


def sent(*arguments: str) -> dict[str, Any]:
    """Return the settings that the command sends."""
    with serving(script) as api:
        assert cli.main(["submit", *arguments, "--url", api.url]) == 0
    (body,) = [asked.body for asked in api.asked if asked.method == "POST"]
    found: dict[str, Any] = body
    return found


def test_without_a_file_the_settings_are_those_of_the_source_and_the_name_is_the_next() -> None:
    assert sent("--from", "math") == {
        "name": "math-2",
        "model": "org/model",
        "dataset_name": "org/data",
        "reward_funcs": ["accuracy_reward"],
        "max_steps": 100,
        "resume_from_checkpoint": ID,
    }


def test_single_settings_can_be_changed_and_a_step_can_be_named() -> None:
    body = sent("--from", f"{ID}:40", "--only-model", "--set", "learning_rate=5e-7", "--set", "name=mine")
    assert body["resume_from_checkpoint"] == f"{ID}:40"
    assert (body["resume_only_model"], body["learning_rate"], body["name"]) == (True, 5e-7, "mine")


def test_the_best_checkpoint_can_be_named() -> None:
    assert sent("--from", "math:best")["resume_from_checkpoint"] == f"{ID}:best"


def test_with_a_file_the_settings_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: org/other\nmax_steps: 7\n")
    assert sent(str(file), "--from", "math:40", "--set", "max_steps=9") == {
        "model": "org/other",
        "max_steps": 9,
        "resume_from_checkpoint": "math:40",
    }


def test_a_file_that_names_a_beginning_of_its_own_does_not_say_how_to_begin_from_another(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | {"ignore_data_skip": True}))
    body = sent(str(file), "--from", "/runs/run-a")
    assert body["resume_from_checkpoint"] == "/runs/run-a"
    assert not body.keys() & {"resume_only_model", "ignore_data_skip"}
    assert sent(str(file), "--from", "/runs/run-a", "--only-model")["resume_only_model"] is True


def test_a_directory_of_a_run_has_the_settings_and_its_path_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run-a" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run-a" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    body = sent("--from", "run-a/checkpoints/step_00000004")
    assert body["resume_from_checkpoint"] == str(checkpoint)
    assert (body["model"], "resume_only_model" in body) == ("org/model", False)


@pytest.mark.parametrize(("status", "names"), [(409, ["math-5"]), (403, [])])
def test_only_a_name_that_runs_have_is_left_out(status: int, names: list[str]) -> None:
    """A service that refuses to look up a name must not be asked for the next one, and the next, without an end."""

    def refusing(asked: Asked) -> Any:
        if asked.path.endswith(("/math-2", "/math-3", "/math-4")):
            return problem(status, "Not now.")
        return script(asked)

    with serving(refusing) as api:
        assert (cli.main(["submit", "--from", "math", "--url", api.url]) == 0) == bool(names)
    bodies = [asked.body for asked in api.asked if asked.method == "POST"]
    assert [body["name"] for body in bodies] == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give a run file, or --from RUN to continue or fork a run"),
        (["--from", "nothing"], "No run has this id"),
        (["--from", "/nowhere/at/all"], "its settings are not known: give a run file"),
        (["--from", "math", "--trl"], "--trl says what FILE is"),
        (["run.yaml", "--only-model"], "--only-model goes with --from RUN"),
        (["--from", "math", "--set", "learning_rate"], "is not a setting; write NAME=VALUE"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(script) as api:
        assert cli.main(["submit", *arguments, "--url", api.url]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_setting_to_leave_out_is_one_of_the_source_and_the_refusal_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "reward_weights has 2 entries for 1 reward_funcs; give one weight a function, or leave reward_weights out"
    body = {"detail": says, "errors": [{"field": "", "message": says}]}

    def refusing(asked: Asked) -> Any:
        return Answer(422, json.dumps(body).encode()) if asked.method == "POST" else script(asked)

    file = tmp_path / "run.yaml"
    file.write_text("model: org/other\n")
    hint = "with --from, the other settings come from math; --set NAME=null leaves one out"
    with serving(refusing) as api:
        for arguments, has_hint in (([], True), ([str(file)], False)):
            assert cli.main(["submit", *arguments, "--from", "math", "--url", api.url]) == 1
            said = capsys.readouterr().err
            assert says in said
            assert (hint in said) is has_hint
    assert sent("--from", "math", "--set", "reward_weights=null")["reward_weights"] is None


def test_a_submit_says_where_the_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    derived = {"begins_from": f"step 100 of {ID} (math)", "steps": 60}
    answer: dict[str, Any] = {"warnings": [], "derived": derived, "run": {"run_id": "run-new"}}
    with serving(lambda asked: answer if asked.method == "POST" else script(asked)) as api:
        assert cli.main(["submit", "--from", "math", "--set", "max_steps=160", "--url", api.url]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == ["submitted run-new", f"it begins from step 100 of {ID} (math), and makes 60 steps"]


def test_the_run_file_of_a_fork_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(script) as api:
        assert cli.main(["submit", "--from", ID, "--print", "--url", api.url]) == 0
    said = capsys.readouterr().out
    assert f"# the settings come from {ID}" in said
    assert f"resume_from_checkpoint: {ID}" in said
    assert all(asked.method == "GET" for asked in api.asked)
