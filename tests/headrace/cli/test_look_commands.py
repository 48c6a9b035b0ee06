"""`rollouts`, `plot`, `logs`, `show` and `runs` on files, and the logs of local services."""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli
from headrace.cli.logs import Tail, find_logs
from headrace.cli.rollouts import chosen, value_in_words
from headrace.local import process_table
from headrace.local.state_dir import Endpoint, StateDir
from headrace.run_file import read_run_file
from shared.errors import UserError
from tests.closed_directory import close_directory
from tests.headrace.scripted_api import Answer, Asked, event_stream, serving

pytestmark = pytest.mark.unit

ROW: dict[str, Any] = {
    "step": 2,
    "group_id": "00000003",
    "branch": 0,
    "prompt": "2+3=",
    "completion": "5",
    "reward": 1.5,
    "advantage": 0.5,
    "rewards": {
        "accuracy_reward": {"outcome": "scored", "value": 1.0, "detail": ""},
        "my_rewards:brevity": {"outcome": "timeout", "value": None, "detail": "no answer in 30 s"},
    },
    "reference": "5",
    "staleness": 1,
    "policy_versions": [[1, 0, 1, 1]],
    "num_tokens": 1,
    "finish_reason": "stop",
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run, in a state directory whose services are down."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_URL"):
        monkeypatch.delenv(name, raising=False)
    found = tmp_path / ".headrace" / "runs" / "run-abc"
    (found / "rollouts").mkdir(parents=True)
    (found / "config.json").write_text('{"name": "first", "max_steps": 4}')
    (found / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.75}\n')
    (found / "rank.log").write_text("one\ntwo\nthree\n")
    write_rollouts(found, ROW)
    return found


def write_rollouts(run_dir: Path, *rows: dict[str, Any]) -> None:
    (run_dir / "rollouts" / "step_00000002.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(("command", "says"), [("rollouts", rb"\u4f60"), ("plot", rb"\u28")])
def test_characters_that_the_locale_does_not_have_are_escaped(run_dir: Path, command: str, says: bytes) -> None:
    write_rollouts(run_dir, ROW | {"completion": "\u4f60"})
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", command, str(run_dir)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert says in ended.stdout


def test_a_run_file_is_printed_as_the_same_run_whatever_the_locale_is(tmp_path: Path) -> None:
    file, again = tmp_path / "run.yaml", tmp_path / "again.yaml"
    file.write_text("model: org/model\nsystem_prompt: \u4f60\u597d, caf\u00e9\n", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", "submit", str(file), "--print"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    again.write_bytes(ended.stdout)
    assert read_run_file(again) == read_run_file(file)


def test_rollouts_have_each_functions_value_the_reference_and_why_they_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rollouts", str(run_dir)]) == 0
    said = capsys.readouterr().out
    (row,) = [line.split() for line in said.splitlines() if "2+3=" in line]
    assert row == ["2+3=", "5", "5", "1.500", "1.000", "timeout", "0.500", "stop", "1:1", "1"]
    for column in ("reference", "accuracy_reward", "brevity", "finish"):
        assert column in said


def test_a_conversation_and_full_texts_are_written_message_by_message(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [{"function": {"name": "add", "arguments": '{"a": 2}'}}]
    said = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is\n\x1b5"},
    ]
    write_rollouts(run_dir, ROW | {"completion": said, "prompt": [{"role": "user", "content": "2+3="}]})
    assert cli.main(["rollouts", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-8:] == [
        "  accuracy_reward 1.000",
        "  brevity timeout (no answer in 30 s)",
        "  reference  5",
        "  USER       2+3=",
        '  ASSISTANT  add({"a": 2})',
        "  TOOL       5",
        "  ASSISTANT  It is",
        r"             \x1b5",
    ]
    write_rollouts(run_dir, ROW | {"completion": "long " * 40})
    assert cli.main(["rollouts", str(run_dir), "--full"]) == 0
    assert "long " * 39 + "long" in capsys.readouterr().out


def test_the_best_and_the_worst_are_ranked_by_reward_without_those_that_have_none() -> None:
    rows = [{"reward": reward} for reward in (0.5, None, 2.0, -1.0)]
    assert chosen(rows, limit=20, best=2, worst=None) == (
        [{"reward": 2.0}, {"reward": 0.5}], "of 4 rollouts of this step, 1 of them without a reward",
    )  # fmt: skip
    assert chosen(rows, limit=20, best=None, worst=1)[0] == [{"reward": -1.0}]
    assert chosen(rows, limit=3, best=None, worst=None) == (rows[:3], "1 more: --limit 4")
    assert chosen(rows, limit=4, best=None, worst=None) == (rows, "")


def test_the_best_are_not_limited_a_second_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["rollouts", str(run_dir), "--best", "5", "--limit", "2"])
    assert "argument --limit: not allowed with argument --best" in capsys.readouterr().err


def test_a_function_that_does_not_apply_differs_from_one_that_failed_and_from_zero() -> None:
    assert value_in_words({"outcome": "scored", "value": 0.0}) == "0.000"
    assert value_in_words({"outcome": "not_applicable", "value": None}) == "-"
    assert value_in_words({"outcome": "error", "value": None}) == "error"
    assert value_in_words(None) == "-"


def test_show_and_runs_say_where_a_run_began_and_count_its_steps_with_those_before(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"name": "longer", "max_steps": 44}
    (run_dir / "config.json").write_text(json.dumps(config))
    began: dict[str, Any] = {"source": "checkpoint", "directory": "/c", "said": "math:40", "run_id": "run-b"}
    began |= {"run_name": "math", "step": 40, "steps_before": 40}
    (run_dir / "beginning.json").write_text(json.dumps(began))
    assert cli.main(["show", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "step 2 of 4 (42 of 44 in all)" in said
    assert "began        from step 40 of run-b (math) " in said
    assert cli.main(["runs", str(run_dir.parent)]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "run-abc" in line]
    assert row[:4] == ["run-abc", "longer", "2/4", "math:40"]
    (run_dir / "beginning.json").write_text(json.dumps(began | {"weights_only": True, "steps_before": 0}))
    assert cli.main(["show", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "step 2 of 44 " in said
    assert "from step 40 of run-b (math), weights only" in said


def test_show_runs_and_plot_read_directories_and_without_services_the_message_says_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", "./.headrace/runs/run-abc"]) == 0
    said = capsys.readouterr().out
    assert "step 2 of 4" in said
    assert said.endswith(f"directory: {run_dir}\n")
    assert "checkpoints" not in said
    for name in ("step_00000001", "step_00000002", ".step_00000002.0.tmp"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    assert cli.main(["show", str(run_dir)]) == 0
    assert f"\ncheckpoints: 1, 2\ndirectory: {run_dir}\n" in capsys.readouterr().out
    assert cli.main(["runs", ".headrace/runs"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "run-abc" in line]
    assert row[:3] == ["run-abc", "first", "2/4"]
    assert cli.main(["plot", str(run_dir), str(run_dir)]) == 0
    assert "reward  first 0.75" in capsys.readouterr().out
    assert cli.main(["show", "run-xyz"]) == 1
    assert capsys.readouterr().err == (
        f"headrace: no headrace service found (looked at {run_dir.parents[1]}): start one with `headrace up`, or read "
        f"its runs from their files with `headrace runs {run_dir.parent}` and `headrace show {run_dir.parent}/RUN`\n"
    )


@pytest.mark.parametrize("named", ["run-abcdefgh", "first", "run-abcd"])
def test_without_services_a_run_is_found_by_its_id_and_name_in_the_state_directory(
    run_dir: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    script = run_dir.parents[1] / "script-20260101-000000-1" / "runs"
    script.mkdir(parents=True)
    here = run_dir.rename(script / "run-abcdefgh")
    assert cli.main(["show", named]) == 0
    said = capsys.readouterr()
    assert said.out.endswith(f"directory: {here}\n")
    assert said.err == f"headrace: reading the files in {here}\n"
    assert cli.main(["logs", named, "-n", "1"]) == 0
    assert capsys.readouterr().out == "three\n"
    shutil.copytree(here, script / "run-abcdxyz")
    assert cli.main(["show", "run-abcd"]) == 1, "two ids begin like this"


def test_without_services_the_run_to_export_is_found_by_its_name(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert cli.main(["export", "first", "--to", "model"]) == 1
    assert f"no complete checkpoint found in {run_dir}/checkpoints" in capsys.readouterr().err


def test_of_several_runs_with_a_name_the_one_that_changed_last_is_read(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = run_dir.parents[1] / "script-20260101-000000-1" / "runs"
    shutil.copytree(run_dir, script / "run-newer")
    os.utime(run_dir / "metrics.jsonl", (1, 1))
    assert cli.main(["show", "first"]) == 0
    assert capsys.readouterr().out.endswith(f"directory: {script / 'run-newer'}\n")
    os.utime(script / "run-newer" / "metrics.jsonl", (0, 0))
    assert cli.main(["show", "first"]) == 0
    assert capsys.readouterr().out.endswith(f"directory: {run_dir}\n")


def test_while_a_service_runs_it_says_which_run_a_name_means(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    other = run_dir.parents[1] / "elsewhere"
    other.mkdir()
    (other / "rank.log").write_text("of the other run\n")
    with serving(lambda _: {"run_id": "run-other", "status": "running", "run_dir": str(other)}) as api:
        assert cli.main(["logs", "first", "--url", api.url]) == 0
        assert capsys.readouterr().out == "of the other run\n"
        assert cli.main(["logs", "run-abc", "-n", "1", "--url", api.url]) == 0
        assert capsys.readouterr().out == "three\n"


def test_the_log_of_a_scripts_run_is_followed_while_the_services_of_the_script_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.cli.logs._ASK_EVERY_S", 0.0)
    state = StateDir(run_dir.parents[1] / "script-20260101-000000-1")
    (state.path / "runs").mkdir(parents=True)
    here = run_dir.rename(state.runs / "run-abc")
    statuses = iter(["running", "running", "finished"])

    def script(_: Asked) -> Any:
        with (here / "rank.log").open("a") as file:
            file.write("more\n")
        return {"run_id": "run-abc", "status": next(statuses), "run_dir": str(here)}

    with serving(script) as api:
        state.make()
        mark = process_table.mark(os.getpid())
        assert mark is not None
        state.write_endpoint(Endpoint(api.url, "", (), launcher=mark, processes={}, is_ready=True))
        assert cli.main(["logs", "first", "--follow", "-n", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["three", "more", "more", "more"]
    assert said.err.endswith("headrace: run-abc has ended (finished)\n")


def test_the_log_of_a_run_without_services_is_followed_to_its_present_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", "run-abc", "--follow", "-n", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == "three\n"
    assert said.err == "headrace: no service runs here that could go on with run-abc\n"
    assert run_dir.exists()


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_the_log_of_a_run_is_followed_to_the_end_of_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    monkeypatch.setattr("headrace.cli.logs._ASK_EVERY_S", 0.0)
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    statuses = iter(["running", "paused", status])

    def script(_: Asked) -> Any:
        with (run_dir / "rank.log").open("a") as file:
            file.write("more\n")
        return {"run_id": "run-abc", "status": next(statuses), "run_dir": str(run_dir)}

    with serving(script) as api:
        assert cli.main(["logs", str(run_dir), "--follow", "-n", "1", "--url", api.url]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["three", "more", "more", "more"]
    assert said.err == f"headrace: run-abc has ended ({status})\n"


def test_without_services_the_message_says_how_to_read_the_runs_of_scripts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_dir.parents[1]
    for script in ("script-20260101-000000-1", "script-20260102-000000-2"):
        (state / script).mkdir()
        (state / script / "runs").mkdir()
        shutil.copytree(run_dir, state / script / "runs" / "run-abc")
    shutil.rmtree(run_dir)
    newest = state / "script-20260102-000000-2" / "runs"
    assert cli.main(["runs"]) == 1
    assert capsys.readouterr().err == (
        f"headrace: no headrace service found (looked at {state}): start one with `headrace up`, or read the runs of "
        f"scripts from their files with `headrace runs {newest}` and `headrace show {newest}/RUN` (1 more in {state})\n"
    )
    assert cli.main(["runs", str(newest)]) == 0
    assert "run-abc" in capsys.readouterr().out


def test_a_run_that_was_watched_to_its_end_has_a_picture_in_its_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"run_id": "run-abc", "status": "finished", "run_dir": str(run_dir), "progress": {"step": 1}}

    def script(asked: Asked) -> Any:
        if asked.path.endswith("/events"):
            return event_stream()
        if asked.path.endswith("/metrics"):
            return {"metrics": [{"step": 1, "reward": 0.5}], "next_cursor": None}
        return {"evaluations": [], "next_cursor": None} if asked.path.endswith("/evaluations") else run

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["watch", "run-abc", "--url", api.url]) == 0
    if importlib.util.find_spec("matplotlib") is None:
        assert "curves" not in capsys.readouterr().out
        return
    assert f"its curves are in {run_dir}/curves.png" in capsys.readouterr().out
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_without_services_checks_settings_and_files_and_says_what_it_did_not_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    monkeypatch.delenv("HEADRACE_STATE_DIR", raising=False)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+3=", "answer": "5"}\n')
    run_file = tmp_path / "run.yaml"
    text = "model: org/small\ndataset_name: train.jsonl\nreward_funcs: [accuracy_reward]\nmax_steps: 3\n"
    run_file.write_text(text)
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run.yaml: no mistake found without services\n")
    assert "  steps: 3\n" in said
    unchecked = "not checked: reward functions, tools, vLLM's options, GPUs, the model org/small on the hub"
    assert said.endswith(f"{unchecked}\n")
    (tmp_path / "org" / "smal").mkdir(parents=True)
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 0
    meant = "there is no directory org/small here; did you mean org/smal?"
    assert capsys.readouterr().out.endswith(f"{unchecked} ({meant})\n")
    assert "  epoch_prompts: 1\n" in said
    run_file.write_text(f"{text}dataset_streaming: true\n")
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 0
    assert "epoch_prompts" not in capsys.readouterr().out
    run_file.write_text(text.replace("max_steps: 3", "max_step: 3"))
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 1
    assert "max_step" in capsys.readouterr().err
    run_file.write_text(text.replace("train.jsonl", "none.jsonl").replace("org/small", "./none"))
    assert cli.main(["submit", "run.yaml", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "dataset_name: " in said
    assert "model: " in said
    run_file.write_text(text.replace("train.jsonl", "closed/train.jsonl").replace("org/small", "./closed/model"))
    with monkeypatch.context() as patch:
        close_directory(patch, tmp_path / "closed")
        assert cli.main(["submit", "run.yaml", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert f"dataset_name: {tmp_path}/closed/train.jsonl cannot be read: Permission denied" in said
    assert f"model: {tmp_path}/closed/model cannot be read: Permission denied" in said
    run_file.write_text(text)
    assert cli.main(["submit", "run.yaml"]) == 1
    assert "no headrace service found" in capsys.readouterr().err


def test_logs_are_those_of_all_services_of_one_or_of_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run_dir.parents[1] / "logs"
    with pytest.raises(UserError, match="contains no logs"):
        find_logs(argparse.Namespace(what=None, state_dir=None))
    logs.mkdir()
    for name in ("trainer", "generator-0", "generator-1"):
        (logs / f"{name}.log").write_text(f"{name} begins\n{name} \x1b ends\n")

    def shown(*options: str) -> list[str]:
        assert cli.main(["logs", *options]) == 0
        return capsys.readouterr().out.splitlines()

    assert shown("trainer", "-n", "1") == [r"trainer \x1b ends"]
    assert shown("generator", "-n", "1") == [
        r"generator-0  generator-0 \x1b ends", r"generator-1  generator-1 \x1b ends",
    ]  # fmt: skip
    assert len(shown()) == 6
    assert shown("run-abc", "-n", "2") == ["two", "three"]
    assert shown(str(run_dir), "-n", "1") == ["three"]
    assert cli.main(["logs", "sessions"]) == 1
    assert (
        "sessions is neither a service nor a run with a log on this machine (services here: generator-0, generator-1, "
        "trainer); no headrace service found" in (capsys.readouterr().err)
    )
    assert cli.main(["logs", "./.headrace"]) == 1
    assert "the run did not start yet, or trains on another machine" in capsys.readouterr().err


def test_the_logs_of_services_on_another_machine_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    answer = {"type": "/problems/no-such-run", "detail": "No run has this id.", "run_id": "trainer"}
    with serving(lambda _: Answer(404, json.dumps(answer).encode())) as api:
        assert cli.main(["logs", "trainer", "--url", api.url]) == 1
    assert capsys.readouterr().err == (
        "headrace: trainer is neither a service nor a run with a log on this machine; there is no run trainer; "
        "`headrace runs` lists them. The logs of services are on the machines that run them\n"
    )


def test_events_are_readable_and_requests_that_only_read_are_left_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def event(message: str, **more: Any) -> str:
        return json.dumps({"at": "2026-11-22T12:00:00.125Z", "level": "INFO", "message": message} | more)

    def request(method: str, status: int) -> str:
        return event(f"{method} {status}", logger="headrace.access", method=method, status=status)

    lines = [
        event("it begins", logger="a"),
        request("GET", 200),
        request("GET", 404),
        request("GET", 0),
        request("POST", 202),
        event("it \x1b fails", level="WARNING", exception="Traceback\nValueError"),
        "a line of vLLM",
        '{"at": 1}',
        '{"cut',
    ]
    logs = run_dir.parents[1] / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text("".join(f"{line}\n" for line in lines))
    assert cli.main(["logs", "trainer"]) == 0
    shown = [
        "2026-11-22T12:00:00Z INFO     it begins",
        "2026-11-22T12:00:00Z INFO     GET 404",
        "2026-11-22T12:00:00Z INFO     GET 0",
        "2026-11-22T12:00:00Z INFO     POST 202",
        r"2026-11-22T12:00:00Z WARNING  it \x1b fails",
        "    Traceback",
        "    ValueError",
        "a line of vLLM",
        '{"at": 1}',
        '{"cut',
    ]
    assert capsys.readouterr().out.splitlines() == shown
    assert cli.main(["logs", "trainer", "--all"]) == 0
    assert capsys.readouterr().out.splitlines() == [shown[0], "2026-11-22T12:00:00Z INFO     GET 200", *shown[1:]]


def test_a_followed_log_gives_whole_lines_once_and_begins_anew_when_it_was_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("one\ntwo\nthr")
    tail = Tail(path)
    assert tail.last(1) == ["two"]
    with path.open("a") as file:
        file.write("ee\nfour\n")
    assert tail.added() == ["three", "four"]
    assert tail.added() == []
    path.write_text("new\n")
    assert tail.added() == ["new"]
    path.unlink()
    assert tail.added() == []
