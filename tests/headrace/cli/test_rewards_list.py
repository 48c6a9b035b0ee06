"""`headrace rewards list`: versions, edits that are not in use, and the state of endpoints."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.command_line import main
from tests.headrace.launcher_rig import local_service
from tests.headrace.scripted_api import Asked, problem, serving


def info(name: str, kind: str, **more: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "summary": "", "required_columns": [], "version": "", "warning": "", **more}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that lists the functions in a rewarder's response."""
    monkeypatch.setenv("HEADRACE_API_KEY", "key")

    def run(*known: dict[str, Any], details: dict[str, Any] | None = None, status: int = 0) -> str:
        def script(asked: Asked) -> Any:
            if asked.path == "/v1/rewards":
                return {"reward_funcs": list(known)}
            return (details or {}).get(asked.path.rpartition("/")[2], problem(404, "no such reward"))

        with serving(script) as api:
            assert main(["rewards", "list", "--rewarder-url", api.url]) == status
        output = capsys.readouterr()
        return output.out + output.err

    return run


def line_of(shown: str, name: str) -> str:
    (line,) = [line for line in shown.splitlines() if line.strip().startswith(name)]
    return line


def test_an_edit_that_is_not_in_force_is_shown_with_the_version_that_is(listed: Callable[..., str]) -> None:
    warning = "an edit of mine is not in force, version abc123 still is: line 3"
    shown = listed(info("mine:judge", "sync", version="abc123", warning=warning), info("accuracy_reward", "built-in"))
    assert "abc123" in line_of(shown, "mine:judge")
    assert warning in " ".join(shown.split())
    assert "abc123" not in line_of(shown, "accuracy_reward")


def test_an_endpoint_is_shown_with_its_url_and_its_breaker(listed: Callable[..., str]) -> None:
    def details(breaker: str, detail: str) -> dict[str, Any]:
        return {"endpoint": {"url": "https://judge.example/v1"}, "state": {"breaker": breaker, "detail": detail}}

    judge = info("judge", "endpoint", version="v7")
    well = listed(judge, details={"judge": {**judge, **details("closed", "")}})
    assert "https://judge.example/v1" in line_of(well, "judge")
    assert "breaker closed" in well
    ill = listed(judge, details={"judge": {**judge, **details("open", "5 failures in a row: refused")}})
    assert "breaker open: 5 failures in a row: refused" in ill


def test_the_rewarder_of_services_elsewhere_is_named_by_its_own_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "key")
    monkeypatch.setenv("HEADRACE_URL", "http://run-api.example")
    assert main(["rewards", "list"]) == 1
    assert "set HEADRACE_REWARDER_URL, or give --rewarder-url" in capsys.readouterr().err
    with serving(lambda _: {"reward_funcs": [info("mine:judge", "sync")]}) as api:
        monkeypatch.setenv("HEADRACE_REWARDER_URL", api.url)
        assert main(["rewards", "list"]) == 0
    assert "mine:judge" in capsys.readouterr().out


def test_an_endpoint_that_was_deleted_meanwhile_stops_nothing(listed: Callable[..., str]) -> None:
    shown = listed(info("judge", "endpoint", version="v7"), info("accuracy_reward", "built-in"))
    assert "v7" in line_of(shown, "judge")
    assert line_of(shown, "accuracy_reward")


def test_a_refusal_of_the_rewarder_is_its_own_sentence_and_other_servers_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "key")
    answers: list[Any] = [problem(403, "This needs the scope read, which your key lacks."), {"runs": []}]
    with serving(lambda _: answers.pop(0)) as api:
        assert main(["rewards", "list", "--rewarder-url", api.url]) == 1
        assert capsys.readouterr().err == "headrace: This needs the scope read, which your key lacks.\n"
        assert main(["rewards", "list", "--rewarder-url", api.url]) == 1
        assert f"{api.url} does not answer like a headrace rewarder" in capsys.readouterr().err
    assert main(["rewards", "list", "--rewarder-url", api.url]) == 1
    assert f"the rewarder at {api.url} cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://a:b:c", "http://[x", "nonsense"])
@pytest.mark.parametrize("command", [["rewards", "list", "--rewarder-url"], ["runs", "--url"]])
def test_what_is_not_an_address_is_refused_with_a_sentence(
    url: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "key")
    assert main([*command, url]) == 1
    assert re.search(r"is not an http:// or https:// address|an address cannot be read", capsys.readouterr().err)


def test_a_key_that_is_refused_is_named_by_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "api-key").write_text("wrong\n")
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "api-key"))
    monkeypatch.setenv("HEADRACE_URL", "http://not-asked:1")
    with serving(lambda _: problem(401, "Send the header 'Authorization: Bearer KEY'.")) as api:
        assert main(["rewards", "list", "--rewarder-url", api.url]) == 1
        assert capsys.readouterr().err == (
            f"headrace: {api.url} does not accept the key in HEADRACE_API_KEY_FILE ({tmp_path / 'api-key'}); "
            "set it to the API key of that service\n"
        )
        state = local_service(tmp_path / ".headrace", api.url)
        assert main(["rewards", "list", "--state-dir", str(state.path)]) == 1
    said = capsys.readouterr().err
    assert f"does not accept the key in {state.api_key_file}" in said
    assert "name it with --rewarder-url" in said
    assert "HEADRACE_API_KEY_FILE: set, but not used" in said
