"""The command line without a service: help, refusals, exit statuses."""

import time
from pathlib import Path

import pytest

from headrace import cli


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty directory, with nothing in the environment that names a service."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_URL", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", ["runs", "show", "watch", "stop", "rollouts"])
def test_without_a_service_every_command_says_where_it_looked_and_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command]) == 1
    assert capsys.readouterr().err == (
        f"headrace: no headrace service found (looked at {tmp_path}/.headrace): start one with `headrace up`\n"
    )


def test_a_launcher_that_died_is_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".headrace").mkdir()
    (tmp_path / ".headrace" / "endpoint.json").write_text(
        '{"api_url": "http://127.0.0.1:1", "rewarder_url": "", "generator_urls": [], "is_ready": true,'
        ' "launcher": [1, 1], "processes": {}}'
    )
    assert cli.main(["runs"]) == 1
    assert "no headrace service found" in capsys.readouterr().err


def test_a_submit_of_no_file_is_refused_before_a_service_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "nothing.yaml"]) == 1
    assert capsys.readouterr().err == "headrace: there is no file nothing.yaml\n"


def test_a_service_elsewhere_needs_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["runs", "--url", "http://trainer:8400"]) == 1
    assert "set HEADRACE_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    assert cli.main(["runs", "--url", "trainer:8400"]) == 1
    assert "no http:// or https:// address" in capsys.readouterr().err


def test_down_without_a_launcher_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["down"]) == 0
    assert "nothing is running" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["up", "--generators", "0"], ["up", "--port", "70000"], ["demo", "--seed", "-1"], ["rollouts", "--step", "x"], []],
)
def test_arguments_that_make_no_sense_are_refused_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


def test_help_names_every_command_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit) as asked:
        cli.main(["--help"])
    assert asked.value.code == 0
    assert time.process_time() - began < 0.5
    shown = capsys.readouterr().out
    for command in ("up", "down", "submit", "runs", "show", "watch", "stop", "rollouts", "demo"):
        assert f"\n    {command} " in shown
