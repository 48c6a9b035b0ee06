"""The first hour on GPUs with real processes: order, limit, a second call, conditions, report, exit status."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu_check.machine import REPOSITORY, Gpu, Machine
from benchmarks.gpu_check.steps import Step
from headrace.local.process_table import mark
from tests.benchmarks.gpu_check.driver import Setup

ONE_GPU = Machine([Gpu("Test 9000", 80.0, 79.0)], "570.1", {"torch": "2.13.0", "CUDA": "13.0"})
WITHIN_S = 120


class Calls:
    """Calls of the driver in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.noted = directory / "noted"
        self.machine = ONE_GPU
        self.steps: list[Step] = []

    def step(self, name: str, *how: str, num_gpus: int = 1, minutes: float = 1.0, gpu_gib: float = 1.0) -> None:
        module = ("tests.benchmarks.gpu_check.command", str(self.noted), name, *how)
        self.steps.append(
            Step(name, f"that {name} runs", module, num_gpus, gpu_gib, numbers=("rate", "mfu"), minutes=minutes)
        )

    def tests(self, name: str, source: str) -> None:
        file = self.directory / f"test_{name}.py"
        file.write_text(f"import pytest, warnings\n{source}\n")
        self.steps.append(Step(name, "that tests are counted", ("pytest", "-p", "no:cacheprovider", str(file))))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        setup = self.directory / "setup.json"
        setup.write_bytes(msgspec.json.encode(Setup(self.steps, self.machine)))
        command = [sys.executable, "-m", "tests.benchmarks.gpu_check.driver", str(setup)]
        return subprocess.Popen(
            [*command, "--directory", str(self.directory / "results"), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # which takes seconds
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=WITHIN_S)
        return process.returncode, output

    def row(self, name: str) -> list[str]:
        lines = (self.directory / "results" / "report.md").read_text().splitlines()
        (row,) = [line for line in lines if line.startswith(f"| `{name}`")]
        return [cell.strip() for cell in row.strip("|").split(" | ")]

    def ran(self) -> list[str]:
        return self.noted.read_text().split() if self.noted.exists() else []

    def left(self) -> list[int]:
        pids = self.noted.with_suffix(".pids")
        return [pid for pid in map(int, pids.read_text().split()) if mark(pid) is not None] if pids.exists() else []


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[Calls]:
    calls = Calls(tmp_path)
    yield calls
    for pid in calls.left():  # after a failure
        os.kill(pid, signal.SIGKILL)


def test_steps_run_in_order_and_a_second_call_goes_on_with_those_that_have_not_passed(calls: Calls) -> None:
    for name, *how in (("first",), ("second", "fail at first"), ("third",)):
        calls.step(name, *how)
    status, output = calls.run()
    assert status == 1
    assert calls.ran() == ["first", "second", "third"]
    assert calls.row("first")[1:2] + calls.row("first")[3:5] == [
        "**passed**",
        "rate 12.5, mfu not known",
        "that first runs",
    ]
    assert calls.row("second")[1:2] + calls.row("second")[3:4] == ["**failed**", "exit status 3"]
    assert "On 1 x Test 9000 (80 GiB)" in output
    assert "driver 570.1, torch 2.13.0, CUDA 13.0" in output
    # The last 40 lines of a failure, and no other step's output.
    assert "line 10\n" in output
    assert "line 9\n" not in output.partition("the last lines of its output")[2]
    assert "this is first" in (calls.directory / "results" / "first.log").read_text()

    status, _ = calls.run()
    assert status == 0
    assert calls.ran() == ["first", "second", "third", "second"]
    assert calls.row("second")[1] == "**passed**"

    assert calls.run("--again", "first", "--only", "first")[0] == 0
    assert calls.ran()[4:] == ["first"]
    assert calls.run()[0] == 0
    assert calls.ran()[5:] == []


def test_a_step_is_ended_at_its_limit_with_all_its_processes_and_the_next_one_runs(calls: Calls) -> None:
    calls.step("endless", "stay", minutes=0.2)
    calls.step("next")
    status, output = calls.run()
    assert status == 1
    assert calls.row("endless")[1] == "**failed**"
    assert calls.row("endless")[3] == "ended at its limit of 0.2 minutes"
    assert "s  this is endless" in output, "progress shows the last line of the output"
    assert calls.ran() == ["endless", "next"]
    assert calls.noted.with_suffix(".pids").exists()
    assert calls.left() == []


def test_a_step_that_passes_leaves_no_process_either(calls: Calls) -> None:
    calls.step("parent", "leave a child")
    assert calls.run()[0] == 0
    assert calls.noted.with_suffix(".pids").exists()
    assert calls.left() == []


def test_a_call_that_is_interrupted_ends_its_step_which_runs_again_in_the_next_call(calls: Calls) -> None:
    calls.step("first")
    calls.step("endless", "stay")
    process = calls.start()
    deadline = time.monotonic() + WITHIN_S
    while not calls.noted.with_suffix(".pids").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "the next call goes on" in output
    assert calls.noted.with_suffix(".pids").exists()
    assert calls.left() == []
    assert calls.row("endless")[1:4] == ["**not run**", "", "not yet"]
    calls.steps.pop()
    calls.step("endless")
    assert calls.run()[0] == 0
    assert calls.ran() == ["first", "endless", "endless"]


def test_a_step_that_this_machine_cannot_run_is_never_passed(calls: Calls) -> None:
    calls.step("two", num_gpus=2)
    calls.step("large", gpu_gib=79.5)
    calls.step("fits")
    status, _ = calls.run()
    assert status == 0
    assert calls.ran() == ["fits"]
    assert calls.row("two")[1:4] == ["**not run**", "", "needs 2 GPUs, there is 1"]
    assert calls.row("large")[1:4] == ["**not run**", "", "needs 79.5 GiB of GPU memory, GPU 0 has 79.0 free"]
    calls.machine = Machine([Gpu("Test 9000", 80.0, 80.0)], "570.1", ONE_GPU.versions)
    assert calls.run()[0] == 0
    assert calls.ran() == ["fits", "large"]


def test_tests_count_as_passed_only_if_all_have_run(calls: Calls) -> None:
    calls.tests("good", "def test_it(record_property): record_property('measured', '5 | 6'); warnings.warn('new')")
    calls.tests("skipped", "def test_it(): pass\n@pytest.mark.skip('no such card')\ndef test_other(): pass")
    calls.tests("bad", "def test_it(): assert 1 == 2\ndef test_other(): pass")
    calls.tests("empty", "")
    assert calls.run()[0] == 1
    assert [calls.row(name)[1] for name in ("good", "skipped", "bad", "empty")] == [
        "**passed**",
        "**not run**",
        "**failed**",
        "**failed**",
    ]
    assert calls.row("good")[3] == "1 passed; 5 \\| 6"
    assert calls.row("skipped")[3] == "1 passed, 1 skipped; no such card"
    assert calls.row("bad")[3] == "exit status 1; 1 passed, 1 failed"
    assert calls.row("empty")[3] == "exit status 5; no test has run"


def test_results_of_another_machine_are_refused(calls: Calls) -> None:
    calls.step("first")
    assert calls.run()[0] == 0
    calls.machine = Machine([Gpu("Test 9001", 80.0, 79.0)], "570.1", ONE_GPU.versions)
    status, output = calls.run()
    assert status == 2
    assert "has results of other GPUs or versions" in output
    assert calls.ran() == ["first"]


def test_without_a_gpu_it_ends_with_a_sentence(calls: Calls) -> None:
    calls.step("first")
    calls.machine = Machine([], "unknown", {"torch": "2.13.0+cpu"})
    assert calls.run() == (
        2,
        "make test-gpu needs an NVIDIA GPU and a CUDA build of torch; torch 2.13.0+cpu sees no GPU\n",
    )
    assert not (calls.directory / "results" / "report.md").exists()


def test_the_list_shows_needs_and_results_without_a_gpu(calls: Calls) -> None:
    calls.step("first", num_gpus=2)
    calls.step("second", "fail")
    calls.run("--only", "second")
    calls.machine = Machine([], "unknown", {"torch": "2.13.0+cpu"})
    status, output = calls.run("--list")
    assert status == 0
    assert "that first runs (2 GPUs, 1 GiB, 1 minutes)\n" in output
    assert "that second runs (1 GPU, 1 GiB, 1 minutes) [failed: exit status 3]\n" in output
    assert calls.ran() == ["second"]
