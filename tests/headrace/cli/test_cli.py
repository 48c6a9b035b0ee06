"""The command line without a service: help, refusals, exit statuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli
from headrace.cli import runs
from tests.headrace.launcher_rig import local_service
from tests.headrace.scripted_api import Answer, Asked, problem, serving
from tests.own_time import bounded_time

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, with no environment variable that names a service."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_URL", "HEADRACE_API_KEY", "HEADRACE_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", ["runs", "show", "watch", "pause", "resume", "stop", "rollouts"])
def test_without_a_service_every_command_says_where_it_looked_and_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command]) == 1
    assert capsys.readouterr().err == (
        f"headrace: no headrace service found (looked at {tmp_path}/.headrace): start one with `headrace up`\n"
    )


def test_a_dead_launcher_is_not_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "is not an http:// or https:// address" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "watch", "pause", "resume", "stop", "rollouts", "export", "download"])
def test_a_run_that_is_not_there_is_refused_in_the_words_of_the_command_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"type": "/problems/no-such-run", "title": "No such run", "status": 404, "run_id": "run-z"}
    answer = Answer(404, json.dumps({**body, "detail": "GET /v1/runs lists them."}).encode())
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    options = ["--to", "out"] if command in ("export", "download") else []
    with serving(lambda _: answer) as api:
        assert cli.main([command, "run-z", *options, "--url", api.url]) == 1
    assert capsys.readouterr().err == "headrace: there is no run run-z; `headrace runs` lists them\n"


@pytest.mark.parametrize(("named", "meant"), [("mth", "math"), ("run-abcdefgj", "run-abcdefgh")])
def test_a_run_that_is_not_there_is_refused_with_a_similar_name(
    named: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"type": "/problems/no-such-run", "title": "No such run", "status": 404, "run_id": named}
    runs = [{"run_id": "run-abcdefgh", "name": "math"}, {"run_id": "run-qrstuvwx", "name": None}]

    def script(asked: Asked) -> Any:
        is_list = asked.path.partition("?")[0] == "/v1/runs"
        return {"runs": runs, "next_cursor": None} if is_list else Answer(404, json.dumps(body).encode())

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["stop", named, "--url", api.url]) == 1
    assert capsys.readouterr().err == f"headrace: there is no run {named}; did you mean {meant}?\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sumbit", "run.yaml"], "headrace: argument COMMAND: there is no 'sumbit'; did you mean submit?"),
        (["keys", "revok", "a"], "headrace keys: argument COMMAND: there is no 'revok'; did you mean revoke?"),
        (
            ["runs", "--status", "runing"],
            "headrace runs: argument --status: there is no 'runing'; did you mean running?",
        ),
    ],
)
def test_a_misspelt_command_or_choice_is_refused_with_a_similar_one(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err.splitlines()[0] == says


def test_a_run_that_was_submitted_and_cannot_be_watched_is_not_taken_for_one_that_was_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("model: m\n")

    def script(asked: Asked) -> Any:
        if asked.method == "POST":
            return {"run": {"run_id": "run-1"}, "warnings": [], "derived": {}}
        return {} if asked.path == "/livez" else problem(403, "This needs a key with the scope read.")

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["submit", "run.yaml", "--watch", "--url", api.url]) == 1
    said = capsys.readouterr()
    assert "submitted run-1" in said.out
    assert said.err.startswith("headrace: run-1 was submitted, but cannot be watched: This needs a key with the scope")


def test_a_configuration_of_trl_is_printed_as_a_run_file_without_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: m\nreward_funcs: a\ndataset_name: d\nvllm_mode: server\n")
    assert cli.main(["submit", "--trl", "grpo.yaml", "--print"]) == 0
    said = capsys.readouterr().out
    assert "\nmodel: m\n" in said
    assert "# vllm_mode: left out; the generator is always vLLM" in said


def test_a_configuration_of_trl_is_submitted_as_a_run_with_a_note_for_each_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: m\nreward_funcs: a\ndataset_name: d\nvllm_mode: server\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    answer: dict[str, Any] = {"run": {"run_id": "run-1"}, "warnings": [], "derived": {}}
    with serving(lambda asked: answer if asked.method == "POST" else {}) as api:
        assert cli.main(["submit", "--trl", "grpo.yaml", "--url", api.url]) == 0
    (submitted,) = [asked.body for asked in api.asked if asked.method == "POST"]
    assert (submitted["model"], submitted["reward_funcs"], submitted["groups_per_step"]) == ("m", ["a"], 1)
    assert "note: vllm_mode: left out;" in capsys.readouterr().out


def test_a_refused_run_is_explained_with_a_line_for_each_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("model: m\n")
    errors = [{"field": "a", "message": "is required"}, {"field": "", "message": "b=1 would change nothing"}]
    body = {"type": "/problems/invalid-run", "title": "Invalid run", "status": 422, "detail": "...", "errors": errors}
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda asked: Answer(422, json.dumps(body).encode()) if asked.method == "POST" else {}) as api:
        assert cli.main(["submit", "run.yaml", "--url", api.url]) == 1
    assert capsys.readouterr().err == ("headrace: the run is refused:\n  a: is required\n  b=1 would change nothing\n")
    (tmp_path / "grpo.yaml").write_text("fp16: true\nneftune_noise_alpha: 5\n")
    assert cli.main(["submit", "--trl", "grpo.yaml"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "headrace: the run is refused:"
    assert [line.partition(":")[0] for line in said[1:]] == ["  fp16", "  neftune_noise_alpha"]


def test_a_key_that_is_refused_is_named_by_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda _: problem(401, "Send the header 'Authorization: Bearer KEY'.")) as api:
        monkeypatch.setenv("HEADRACE_API_KEY", "wrong")
        assert cli.main(["runs", "--url", api.url]) == 1
        assert capsys.readouterr().err == (
            f"headrace: {api.url} does not accept the key in HEADRACE_API_KEY; set it to the API key of that service\n"
        )
        state = local_service(tmp_path / ".headrace", api.url)
        refused = f"does not accept the key in {state.api_key_file}, which has changed since the service was started"
        unused = f"(HEADRACE_API_KEY: set, but not used for the service of {state.path}; it is used with --url)\n"
        for options in ([], ["--state-dir", str(state.path)]):
            assert cli.main(["runs", *options]) == 1
            said = capsys.readouterr().err
            assert refused in said
            assert said.endswith(unused)
        monkeypatch.delenv("HEADRACE_API_KEY")
        assert cli.main(["runs"]) == 1
        said = capsys.readouterr().err
        assert refused in said
        assert "not used" not in said


def test_local_services_get_their_own_key_and_remote_services_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported production key is not sent to a service whose address comes from a folder."""
    (tmp_path / "api-key").write_text("of-a-file\n")
    with serving(lambda _: {"runs": [], "next_cursor": None}) as api:
        state = local_service(tmp_path / ".headrace", api.url)

        def shown(*options: str) -> str:
            assert cli.main(["runs", *options]) == 0
            return api.asked[-1].headers["authorization"].removeprefix("Bearer ")

        monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "api-key"))
        assert shown() == state.keys().api_key
        assert shown("--url", api.url) == "of-a-file"
        monkeypatch.setenv("HEADRACE_API_KEY", "of-the-environment")
        assert shown() == state.keys().api_key
        assert shown("--url", api.url) == "of-the-environment"
        assert shown("--state-dir", str(state.path)) == state.keys().api_key
        monkeypatch.setenv("HEADRACE_URL", api.url)
        assert shown() == "of-the-environment"
        assert shown("--state-dir", str(state.path)) == state.keys().api_key


COMMANDS = [["runs"], ["submit", "run.json"], ["show", "run-a"], ["rewards", "list", "--rewarder-url", "http://h:1"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_file_that_is_not_there_is_named_by_every_command_with_what_to_do(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"model": "m"}')
    monkeypatch.setenv("HEADRACE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", "/nowhere/api-key")
    assert cli.main(command) == 1
    assert capsys.readouterr().err == (
        "headrace: HEADRACE_API_KEY_FILE: /nowhere/api-key cannot be read: No such file or directory; "
        "correct the path, or unset the variable\n"
    )


def test_runs_that_wait_are_listed_with_what_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probing = "a reward function to work again; one group every 5 s tries it"
    run: dict[str, Any] = {"status": "running", "started_at_s": 5.0, "name": None}
    runs: list[dict[str, Any]] = [
        run | {"run_id": "run-b", "status": "queued", "progress": {}, "waiting_for": "run run-a to end"},
        run | {"run_id": "run-a", "progress": {"step": 3, "max_steps": 9}, "waiting_for": probing},
        run | {"run_id": "run-0", "status": "finished", "progress": {"step": 9, "max_steps": 9}, "waiting_for": None},
    ]
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda _: {"runs": runs, "next_cursor": None}) as api:
        assert cli.main(["runs", "--url", api.url]) == 0
    shown = capsys.readouterr().out
    assert "3/9" in shown
    assert "?" not in shown
    assert shown.endswith(f"run-b waits for run run-a to end\nrun-a waits for {probing}\n")


def test_a_paused_run_is_listed_with_why_and_with_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = {"run_id": "run-a", "status": "paused", "name": None, "started_at_s": 5.0, "progress": {"step": 3}}
    run = paused | {"reason": "reward function judge failed", "waiting_for": "reward function judge to work again"}
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda _: {"runs": [run], "next_cursor": None}) as api:
        assert cli.main(["runs", "--url", api.url]) == 0
    assert capsys.readouterr().out.endswith(
        "run-a is paused: reward function judge failed\nrun-a waits for reward function judge to work again\n"
    )


@pytest.mark.parametrize(
    ("command", "before", "after", "said"),
    [
        ("pause", "running", "running", "run-a pauses after its current batch, until `headrace resume run-a`"),
        ("pause", "queued", "queued", "run-a has not started, and will not start until `headrace resume run-a`"),
        ("resume", "paused", "paused", "run-a goes on"),
        ("resume", "running", "running", "run-a is not paused: it is running"),
    ],
)
def test_a_run_is_paused_and_resumed_by_its_commands(
    command: str,
    before: str,
    after: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(asked: Asked) -> dict[str, Any]:
        return {"run_id": "run-a", "desired": "run", "status": after if asked.method == "POST" else before}

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main([command, "run-a", "--url", api.url]) == 0
        assert [asked.path for asked in api.asked if asked.method == "POST"] == [f"/v1/runs/run-a/{command}"]
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("command", ["runs", "down"])
def test_a_current_directory_that_was_deleted_is_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for name in ("HEADRACE_URL", "HEADRACE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main([command]) == 1
    assert capsys.readouterr().err == "headrace: the current directory no longer exists; cd to another one\n"


def test_output_that_finds_no_space_is_a_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "headrace", "runs", str(tmp_path)],
            cwd=Path(__file__).parents[3],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == b"headrace: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["runs", "."], ["logs", "--state-dir", "."]])
def test_output_whose_reader_has_ended_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, nothing is left to be written at exit
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("begins\n")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_run_that_ended_is_not_paused_and_the_refusal_is_the_services(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(asked: Asked) -> Any:
        if asked.method == "POST":
            return problem(409, "The run has ended: it is finished.")
        return {"run_id": "run-a", "desired": "run", "status": "finished"}

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        assert cli.main(["pause", "run-a", "--url", api.url]) == 1
    assert capsys.readouterr().err == "headrace: The run has ended: it is finished.\n"


def test_rollouts_say_which_versions_of_which_trainer_sampled_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"step": 3, "prompt": "2+3=", "completion": "5", "policy_versions": [[57, 0, 4, 1], [55, 4, 9, 2]]},
        {"step": 3, "prompt": "1+1=", "completion": "2", "policy_versions": [[56, 0, 9, 2]]},
    ]

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda _: {"run_id": "run-a", "step": 3, "newest_step": 3, "rollouts": rows}) as api:
        assert cli.main(["rollouts", "run-1", "--step", "3", "--url", api.url]) == 0
    shown = capsys.readouterr().out
    assert "1:57-2:55" in shown
    assert "2:56 " in shown


def test_rollouts_of_agents_are_shown_with_their_rows_tool_calls_and_losses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    plain: dict[str, Any] = {"step": 3, "prompt": "1+1=", "completion": "2", "policy_versions": []}
    forked: dict[str, Any] = {
        **plain,
        "completion": [call, {"role": "tool", "content": "5"}],
        "rows": [{"num_tokens": 12}, {"num_tokens": 30}],
        "tool_calls": 3,
        "tool_failures": 1,
    }
    shown: list[str] = []
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    for rows in ([plain], [plain, forked, {**plain, "lost": "hung"}]):
        with serving(lambda _, rows=rows: {"run_id": "run-a", "step": 3, "rollouts": rows}) as api:  # type: ignore[misc]
            assert cli.main(["rollouts", "run-1", "--step", "3", "--url", api.url]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    assert "rows" not in shown[0]
    for text in ("ASSISTANT add({}) TOOL 5", "rows 12+30", "failed tool calls 1/3", "lost: hung"):
        assert text in shown[1]


def test_down_without_a_launcher_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["down"]) == 0
    assert "nothing is running" in capsys.readouterr().out


TIME = "is not a valid timeout: it must be above 0 s and at most 3600 s"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--generators", "0"], "up: argument --generators: 0 is less than 1"),
        (["up", "--port", "70000"], "up: argument --port: 70000 is not a port: 1 to 65535"),
        (["demo", "--seed", "-1"], "demo: argument --seed: -1 is less than 0"),
        (["rollouts", "--step", "x"], "rollouts: argument --step: x is not a whole number"),
        (["doctor", "--timeout-s", "0"], f"doctor: argument --timeout-s: 0 {TIME}"),
        (["doctor", "--timeout-s", "inf"], f"doctor: argument --timeout-s: inf {TIME}"),
        (["doctor", "--timeout-s", "long"], "doctor: argument --timeout-s: long is not a number"),
        (["plan", "--trainer-gpus", "2.5"], "plan: argument --trainer-gpus: 2.5 is not a whole number"),
        (["plan", "--gpu-gib", "-3"], "plan: argument --gpu-gib: -3 is not above 0"),
        (["plan", "--gpu-gib", "nan"], "plan: argument --gpu-gib: nan is not a number"),
        (["plan", "--num-generations", "x"], "plan: argument --num-generations: x is not a whole number"),
        (["edit", "sums", "--learning-rate", "1e-4"], "edit: unrecognized arguments: --learning-rate 1e-4"),
        (
            ["submit", "--from", "sums", "--beta", "0.1"],
            "submit: unrecognized arguments: --beta; a setting of the run is given as --set beta=VALUE",
        ),
        ([], ": the following arguments are required: COMMAND"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_a_sentence_and_where_the_rest_is_told(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2
    prog = " ".join(["headrace", *arguments[:1]])
    separator = " " if arguments else ""
    assert capsys.readouterr().err == f"headrace{separator}{says}\n`{prog} --help` says more\n"


@pytest.mark.parametrize("arguments", [["show", "~nosuch/x"], ["runs", "~nosuch/x"], ["logs", "~nosuch/x"]])
def test_the_home_of_nobody_is_a_directory_that_is_not_there(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert "~nosuch" in capsys.readouterr().err


def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(tmp_path / "mine"))

    monkeypatch.setattr(runs, "runs", fails)
    assert cli.main(["runs"]) == 1
    assert capsys.readouterr().err == f"headrace: {tmp_path}/mine: Permission denied\n"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("HEADRACE_API_KEY", "schlüssel", "the API key has characters that no key has"),
        ("HEADRACE_URL", "http://a\tb", "is not a URL"),
    ],
)
def test_a_key_or_url_that_cannot_be_sent_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, says: str
) -> None:
    for variable, given in {"HEADRACE_URL": "http://127.0.0.1:1", "HEADRACE_API_KEY": "k", name: value}.items():
        monkeypatch.setenv(variable, given)
    assert cli.main(["runs"]) == 1
    assert says in capsys.readouterr().err


def test_help_names_every_command_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with bounded_time(0.5), pytest.raises(SystemExit) as asked:
        cli.main(["--help"])
    assert asked.value.code == 0
    shown = capsys.readouterr().out
    for command in (
        "up",
        "down",
        "submit",
        "runs",
        "show",
        "watch",
        "edit",
        "pause",
        "resume",
        "stop",
        "rollouts",
        "demo",
    ):
        assert f"\n    {command} " in shown
