"""`headrace rewards check` on the command line: real workers, real rows, and an exit status for scripts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.command_line import main
from tests.kept_ports import kept_port
from tests.rewarder.conftest import ROOT, RewarderProcess
from tests.rewarder.conftest import start_rewarder as start_rewarder

REWARDS = """
import asyncio, os, threading, time


def brevity(completions, **columns):
    \"\"\"Shorter is better.\"\"\"
    return [1.0 / (1 + len(text)) for text in completions]


def half_of_it(completions, **columns):
    return [None, float("nan")]


def raises(completions, **columns):
    raise ValueError("the judge is ill")


def exits(completions, **columns):
    os._exit(3)


def hangs(completions, **columns):
    while True:
        time.sleep(0.05)


async def beside_a_thread(completions, **columns):
    if not any(thread.name == "of the module" for thread in threading.enumerate()):
        threading.Thread(target=time.sleep, args=(3600,), name="of the module").start()
    return [1.0] * len(completions)


async def blocks_the_loop(completions, **columns):
    time.sleep(5)
    return [1.0] * len(completions)


async def refuses_to_end(completions, **columns):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


def of_messages(completions, **columns):
    return [len(message["content"]) for (message,) in completions]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("project")
    (directory / "my_rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(3)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def check(project: Path, function: str, *more: str) -> "subprocess.CompletedProcess[str]":
    return headrace(project, "check", function, "--dataset", "rows.jsonl", "--prompt-column", "question", *more)


def headrace(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", "rewards", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("option", [["--prompt-as-message"], ["--system-prompt", "Be brief."]])
def test_a_function_gets_messages_where_a_run_would_send_them(project: Path, option: list[str]) -> None:
    assert check(project, "my_rewards.py:of_messages", *option).returncode == 0
    assert check(project, "my_rewards.py:of_messages").returncode == 1


def test_a_file_named_like_a_standard_module_beside_the_function_hides_nothing(project: Path, tmp_path: Path) -> None:
    for name in ("random.py", "calendar.py", "signal.py"):
        (tmp_path / name).write_text("raise SystemExit('the file where the user stands was imported')")
    for name in ("my_rewards.py", "rows.jsonl"):
        shutil.copy(project / name, tmp_path)
    # The script that pip writes. Unlike `python -m`, it does not import from the working directory.
    installed = tmp_path / "bin" / "headrace"
    installed.parent.mkdir()
    installed.write_text("import sys\nfrom headrace.__main__ import main\nif __name__ == '__main__': sys.exit(main())")
    done = subprocess.run(
        [sys.executable, str(installed), "rewards", "check", "my_rewards.py:brevity", "--dataset", "rows.jsonl",
         "--prompt-column", "question"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "outcomes:    6 scored" in done.stdout


def test_a_built_in_distinguishes_right_rows_from_wrong_rows(project: Path) -> None:
    done = check(project, "accuracy_reward")
    assert done.returncode == 0, done.stderr
    assert "outcomes:    6 scored" in done.stdout
    assert "values:      0 to 1, mean 0.5" in done.stdout
    assert "trained on:  3 of 3 groups" in done.stdout


def test_a_function_in_a_file_shows_values_version_and_latency(project: Path) -> None:
    done = check(project, "my_rewards.py:brevity")
    assert done.returncode == 0, done.stderr
    assert "function:    my_rewards:brevity, sync, version " in done.stdout
    assert "says:        Shorter is better." in done.stdout
    assert "latency:     median " in done.stdout
    assert "3 with equal rewards" in done.stdout, "'#### 0' and '#### 2' are equally long"


def test_a_thread_that_the_function_starts_does_not_keep_the_command_from_ending(project: Path) -> None:
    done = check(project, "my_rewards.py:beside_a_thread")
    assert done.returncode == 0, done.stderr
    assert "outcomes:    6 scored" in done.stdout


def test_a_function_is_given_what_a_run_would_give_it(project: Path) -> None:
    done = check(project, "regex_reward", "--kwargs", '{"pattern": "#### [02]$"}')
    assert done.returncode == 0, done.stderr
    assert "values:      0 to 1, mean 0.6667" in done.stdout, "4 is in two of six"
    assert "missing:" not in done.stdout


def test_generated_code_runs_where_the_environment_says(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "p", "solution": "```python\n```", "tests": ["pass"]}]
    (project / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HEADRACE_BWRAP", str(project / "no-bwrap"))
    command = ("check", "code_execution_reward", "--dataset", "code.jsonl")
    done = headrace(project, *command)
    assert done.returncode == 2
    assert "code_execution_reward has no sandbox to run code in: bubblewrap is not installed" in done.stderr
    monkeypatch.setenv("HEADRACE_SANDBOX", "chroot")
    refused = headrace(project, *command)
    assert refused.returncode == 2
    assert refused.stderr.startswith("headrace: HEADRACE_SANDBOX: Input should be 'bubblewrap' or 'docker'")


def test_a_function_has_the_memory_that_the_environment_says(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "hogging.py").write_text("def hog(completions, **_): return [float(len(bytearray(20 << 30)))]\n")
    monkeypatch.setenv("HEADRACE_WORKER_MEMORY_MIB", "2048")
    done = check(project, "hogging:hog")
    assert done.returncode == 1, done.stderr
    assert "a worker has 2048 MiB of address space" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("half_of_it", ["3 not_applicable", "3 invalid", "returned nan", "3 dropped as unscorable"]),
        ("raises", ["6 error", "ValueError: the judge is ill", 'my_rewards.py", line 15, in raises']),
        ("exits", ["6 error", "died twice: it ended with exit status 3"]),
        ("hangs", ["6 timeout", "took longer than 0.5 s and was killed"]),
        ("blocks_the_loop", ["6 timeout", "a function that blocks should be a plain def"]),
        ("refuses_to_end", ["6 timeout", "must neither block nor swallow CancelledError"]),
    ],
)
def test_a_failing_function_is_shown_with_its_error_and_the_exit_status_is_not_0(
    project: Path, function: str, says: list[str]
) -> None:
    deadline = "0.5" if any("timeout" in word for word in says) else "120"
    done = check(project, f"my_rewards:{function}", "--timeout-s", deadline)
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert not [words for words in says if words not in text], done.stdout
    assert "trained on: 0 of 3 groups" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["my_rewards:brevty"], "Did you mean brevity?"),
        (["acuracy_reward"], "Did you mean 'accuracy_reward'?"),
        (["my_rewards:brevity", "--completion-column", "gold"], "the data set has no column 'gold'"),
        (
            ["my_rewards:brevity", "--timeout-s", "0"],
            "0 is not a valid timeout: it must be above 0 s and at most 3600 s",
        ),
        (["my_rewards:brevity", "--split", "test"], "dataset_train_split"),
        (["my_rewards:brevity", "--rename", "answer=answer"], "rename_columns"),
        (["my_rewards:brevity", "--dataset", ""], "dataset_name"),
        (["regex_reward", "--kwargs", "{"], "--kwargs is not JSON: "),
        (["regex_reward", "--kwargs", "[1]"], "--kwargs: write a table of arguments and values"),
        (["regex_reward", "--kwargs", '{"x y": 1}'], "'x y' cannot be the name of an argument"),
        (["regex_reward", "--kwargs", '{"pattern": "("}'], "regex_reward cannot use its pattern: missing )"),
    ],
)
def test_a_mistake_in_the_arguments_is_a_sentence_and_exit_status_2(
    project: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(project)
    rows = ("--dataset", "rows.jsonl", "--prompt-column", "question")
    with pytest.raises(SystemExit, match=r"^2$"):
        sys.exit(main(["rewards", "check", *arguments[:1], *rows, *arguments[1:]]))
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_the_rows_of_a_relative_directory_are_read(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    shutil.copytree(project, tmp_path / "here")
    (tmp_path / "here" / "data").mkdir()
    shutil.move(tmp_path / "here" / "rows.jsonl", tmp_path / "here" / "data" / "train.jsonl")
    done = headrace(
        tmp_path / "here", "check", "my_rewards:brevity", "--dataset", "data", "--prompt-column", "question"
    )
    assert done.returncode == 0, done.stderr
    assert "trained on:" in done.stdout


def test_listing_without_a_service_says_where_it_was_looked_for(tmp_path: Path) -> None:
    done = headrace(tmp_path, "list", "--state-dir", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"headrace: no headrace service found (looked at {tmp_path}/none)")


def test_the_functions_of_a_running_rewarder_are_listed(
    tmp_path: Path, start_rewarder: Callable[..., RewarderProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewarder = start_rewarder()
    rewarder.wait_until_ready()
    monkeypatch.setenv("HEADRACE_API_KEY", "key-of-the-test")
    done = headrace(tmp_path, "list", "--rewarder-url", rewarder.url(""))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("accuracy_reward ")]
    assert "solution or answer" in line
    monkeypatch.setenv("HEADRACE_API_KEY", "another")
    refused = headrace(tmp_path, "list", "--rewarder-url", rewarder.url(""))
    assert refused.returncode == 1
    assert "does not accept the key in HEADRACE_API_KEY" in refused.stderr
    nobody = headrace(tmp_path, "list", "--rewarder-url", f"http://127.0.0.1:{kept_port()}")
    assert nobody.returncode == 1
    assert "cannot be reached" in nobody.stderr
