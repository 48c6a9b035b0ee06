"""A script's services live as long as its process."""

import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.client import HeadraceApiError, HeadraceClient, Submission
from headrace.grpo import script_services
from headrace.grpo.argument_error import ArgumentError
from headrace.local import guarded_exec
from headrace.local.state_dir import STATE_DIR_VARIABLE, StateDir
from shared.errors import UserError
from tests.closed_directory import close_directory
from tests.headrace.launcher_rig import local_service
from tests.headrace.scripted_api import Asked, problem, serving

pytestmark = pytest.mark.unit


Processes = list["subprocess.Popen[bytes]"]


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Have processes that only sleep started as services, and return them."""
    started: Processes = []

    def start(*_: Any, **__: Any) -> "subprocess.Popen[bytes]":
        command = [*guarded_exec.guard(), "sh", "-c", "echo up; exec sleep 100"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return started[-1]

    def wait_until_up(_: Any, process: "subprocess.Popen[bytes]") -> Any:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.stdout.close()
        return SimpleNamespace(num_simulated=0, api_url="http://127.0.0.1:1", ca_file=None)

    StateDir(tmp_path).make()
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    monkeypatch.setattr(script_services, "start_detached", start)
    monkeypatch.setattr(script_services, "wait_until_up", wait_until_up)
    return started


def test_an_address_with_a_password_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://user:secret@trainer:8400")
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with pytest.raises(UserError, match="no user and no password") as refused:
        script_services.find_services(say=lambda _: None)
    assert "secret" not in str(refused.value)


def test_a_directory_that_this_user_may_not_read_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run-a").mkdir()
    with HeadraceClient("http://127.0.0.1:1", "k") as client:
        services = script_services.ScriptServices(client, None)
        assert services.see_here(tmp_path)
        assert services.see_here(tmp_path / "run-a")
        close_directory(monkeypatch, tmp_path)
        assert not services.see_here(tmp_path)
        assert not services.see_here(tmp_path / "run-a")


def test_services_outlive_the_thread_that_asked_for_them(processes: Processes) -> None:
    found: list[script_services.ScriptServices] = []
    thread = threading.Thread(target=lambda: found.append(script_services.find_services(say=lambda _: None)))
    thread.start()
    thread.join()
    (services,) = found
    services.client.close()
    assert services.in_words == "services started for this script"
    (process,) = processes
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    script_services.end_started()
    assert process.returncode is not None


def test_services_that_another_process_is_starting_are_waited_for(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = local_service(tmp_path, "http://127.0.0.1:1")
    ready = state.endpoint()
    assert ready is not None
    state.write_endpoint(replace(ready, is_ready=False))
    assert not script_services.would_start_services()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        state.write_endpoint(ready)

    services = script_services.find_services(say=say)
    services.client.close()
    assert said == [f"waiting for `headrace up` in {tmp_path}, which is starting"]
    assert services.in_words == f"the services of `headrace up` in {tmp_path}"
    monkeypatch.setattr(script_services, "_STARTING_S", 0.0)
    state.write_endpoint(replace(ready, is_ready=False))
    with pytest.raises(UserError, match="is not up after 0 s"):
        script_services.find_services(say=said.append)
    assert processes == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_services_and_files_to_its_parent(processes: Processes) -> None:
    services = script_services.find_services(say=lambda _: None)
    (process,), directory = processes, services.own_directory()
    child = os.fork()
    if child == 0:
        del services
        os._exit(len(vars(script_services)["_started"]))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert process.poll() is None
        assert directory.is_dir()
    finally:
        services.client.close()
        script_services.end_started()
    del services
    assert not directory.exists()


def test_a_process_has_one_set_of_services(tmp_path: Path, processes: Processes) -> None:
    """A run of another process is gone on with after an evaluation, whose services are not the run's."""
    earlier = tmp_path / "earlier"
    StateDir(earlier).make()
    said: list[str] = []
    try:
        for resumed in (None, earlier):
            script_services.find_services(resumed=resumed, say=said.append).client.close()
        evaluated, resumed_there = processes
        assert evaluated.returncode is not None
        assert resumed_there.poll() is None
        assert [line for line in said if line.startswith(f"ending this process's services in {tmp_path}")]
    finally:
        script_services.end_started()


def test_settings_that_the_run_api_refuses_are_a_value_error_as_in_trl() -> None:
    answers = [problem(422, "temperature: must be above 0"), problem(409, "another run has this name")]
    with serving(lambda _: answers.pop(0)) as api, HeadraceClient(api.url, "k") as client:
        with pytest.raises(ArgumentError, match="temperature: must be above 0"):
            script_services.begin_run(client, {"temperature": -1.0}, say=list[str]().append)
        with pytest.raises(HeadraceApiError, match="another run has this name"):
            script_services.begin_run(client, {"name": "a"}, say=list[str]().append)


def test_the_earlier_run_of_the_process_is_stopped_also_if_it_was_resumed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_services, "_latest_run", {})
    stopped: list[str] = []

    def answer(asked: Asked) -> Any:
        if asked.method == "POST" and asked.path == "/v1/runs":
            return {"run": {"run_id": "run-b"}, "warnings": [], "derived": {}}
        if asked.path.endswith("/stop"):
            stopped.append(asked.path)
        return {"run_id": "run-a", "status": "paused"}

    said: list[str] = []
    with serving(answer) as api, HeadraceClient(api.url, "k") as client:
        script_services.stop_other_run(client, "run-a", say=said.append)
        script_services.stop_other_run(client, "run-a", say=said.append)
        assert (stopped, said) == ([], [])
        script_services.begin_run(client, {}, say=said.append)
    assert stopped == ["/v1/runs/run-a/stop"]
    assert said == ["note: run-a, which this process began before and which has not ended, is stopped"]


class Interrupted(HeadraceClient):
    def submit(self, config: Mapping[str, Any]) -> Submission:
        raise KeyboardInterrupt


def test_ctrl_c_while_a_run_is_submitted_says_that_there_may_be_one() -> None:
    said: list[str] = []
    with Interrupted("http://127.0.0.1:1", "k") as client, pytest.raises(KeyboardInterrupt):
        script_services.begin_run(client, {}, say=said.append)
    (note,) = said
    assert note.startswith("note: the run may have been submitted all the same")
