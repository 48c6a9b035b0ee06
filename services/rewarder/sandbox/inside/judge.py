"""Process 1 of the sandbox: tests the generated code. Only this process knows the tests and the expected values.

    stdin --payload--> judge --calls, arguments--> tested code      assert lines: the judge evaluates them
                         |  <--plain data--------- (tested_code.py)
                         +-----stdin-------------> the program      input and output: the judge compares them
                         |  <--stdout------------- (a new process for each case)
                         +--nonce and verdict----> stdout

The code under test runs in another process and never sees an assert line. It cannot pass by patching, overwriting or
printing something: a call returns plain data, and the judge compares the data here. As process 1 the judge cannot be
killed from inside the sandbox. It is also not dumpable: processes of the same user cannot read its memory, pipes and
environment.
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from services.rewarder.sandbox.inside.processor_time import (
    last_number,
    note_waiting,
    num_noted,
    num_tasks,
    used_s,
    waited_s,
)
from services.rewarder.sandbox.inside.remote_code import CodeGoneError, TestedCode, UnfitTestError, how_it_ended, start

_PR_SET_DUMPABLE = 4
_SPARE_OUTPUT_BYTES = 1 << 20
"""A program may print this much more than expected."""
_PROGRAM = "program.py"
_RUN_PROGRAM = (
    "import resource, runpy\n"
    "try: open('/proc/self/oom_score_adj', 'w').write('1000')\n"
    "except OSError: pass\n"
    "resource.setrlimit(resource.RLIMIT_CPU, ({0}, {0} + 1)); del resource\n"
    "runpy.run_path('program.py', run_name='__main__')"
)
_LOOK_EVERY_S = 0.2
_MANY_TASKS = 16
"""Processes and threads made by the code. With this many, the code waits for its own processes, not for others."""


class Verdicts:
    """Collects the test results and prints the verdict once, at the end of the tests or of the time."""

    def __init__(self, nonce: str, num_tests: int) -> None:
        self._nonce = nonce
        self._lock = threading.Lock()
        self._has_begun = False
        self.passed = [False] * num_tests
        self.why = ""

    def begin(self) -> None:
        """Print that the tested code starts to run. If no verdict follows, the code is at fault."""
        if not self._has_begun:
            self._has_begun = True
            os.write(1, json.dumps({"nonce": self._nonce, "begun": True}).encode() + b"\n")

    def note(self, index: int, why: str) -> None:
        """Record why a test failed. Only the reason of the first failed test is kept."""
        self.why = self.why or f"test {index + 1} of {len(self.passed)}: {why}"[:250]

    def give_up(self, why: str) -> None:
        """Print that no verdict is possible, and end the sandbox.

        If the tested code has started, the tests that it has passed so far are the verdict instead.
        """
        if not self._has_begun:
            self.say(unjudged=why[:200])
        self.why = self.why or why[:250]
        self.say()

    def say(self, **more: Any) -> None:
        """Print the verdict and end the sandbox."""
        with self._lock:
            said = {"nonce": self._nonce, "num_passed": sum(self.passed), "why": self.why, **more}
            os.write(1, json.dumps(said).encode() + b"\n")
            os._exit(0)


def _sweep() -> None:
    """Kill all other processes of the sandbox and wait for them: until then they use up limits and can write files."""
    if os.getpid() != 1:  # outside a sandbox, kill(-1) would end every process of this user
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _clear_scratch() -> None:
    """Remove the files that a program left. A file that cannot be removed affects only later cases of the same code."""
    with contextlib.suppress(OSError):
        os.chmod(os.getcwd(), 0o700)
        for entry in os.scandir():
            with contextlib.suppress(OSError, RecursionError):
                (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)


def _run_asserts(payload: dict[str, Any], verdicts: Verdicts) -> None:
    compiled: list[Any] = []
    for index, test in enumerate(payload["tests"]):
        try:
            compiled.append(compile(test, "<test>", "exec"))
        except (SyntaxError, ValueError, RecursionError) as error:
            verdicts.say(unfit=f"test {index + 1} is not valid for the sandbox's Python: {error}")
    code: TestedCode | None = None
    names: dict[str, Any] = {"__name__": "tests"}
    of_code: dict[str, Any] = {}
    for index, test in enumerate(compiled):
        try:
            if code is None:
                code = _started(payload, verdicts)
                # A name that a test has reassigned keeps the test's value. Code that ends itself and is started again
                # cannot take the name back.
                free = [name for name in code.names if name not in names or names[name] is of_code.get(name, names)]
                of_code = {name: code.names[name] for name in free}
                names |= of_code
            exec(test, names)
            code.check()
            verdicts.passed[index] = True
        except UnfitTestError as error:
            verdicts.say(unfit=f"test {index + 1} {error}")
        except CodeGoneError as error:
            verdicts.note(index, str(error))
            if code is None or str(error).endswith("processor time"):
                return  # the code cannot be loaded or does not end, so the other tests would fail the same way
            code = None
            _sweep()
        except BaseException as error:  # noqa: BLE001  a test may raise any exception
            verdicts.note(index, f"{type(error).__name__}: {error}".rstrip(": "))


def _started(payload: dict[str, Any], verdicts: Verdicts) -> TestedCode:
    try:
        process = start([sys.executable, "-I", "-c", payload["tested_code"]], stdin=subprocess.PIPE)
    except OSError as error:
        verdicts.give_up(f"no process could be started for the code: {error}")
        raise
    verdicts.begin()
    return TestedCode(process, payload["code"], payload["cpu_s"])


def _run_cases(payload: dict[str, Any], verdicts: Verdicts) -> None:
    for index, case in enumerate(payload["tests"]):
        try:
            given = _prepare(payload["code"], case["input"])
        except OSError as error:
            if index == 0:
                raise  # no program has run yet, so the code is not the cause
            verdicts.note(index, f"its program left no room for the next case: {error}")
            continue
        with given:
            try:
                process = start([sys.executable, "-I", "-c", _RUN_PROGRAM.format(payload["cpu_s"])], stdin=given)
            except OSError as error:
                verdicts.give_up(f"no process could be started for the code: {error}")
                raise
        verdicts.begin()
        assert process.stdout is not None
        max_bytes = len(case["output"].encode("utf-8", "surrogatepass")) + _SPARE_OUTPUT_BYTES
        output = process.stdout.read(max_bytes + 1)
        is_too_much = len(output) > max_bytes
        # No timeout here: on a busy machine the process may take long to end. The time of all tests is its limit.
        how = "" if is_too_much else how_it_ended(process, within_s=None)
        if is_too_much:
            verdicts.note(index, f"it printed over {_SPARE_OUTPUT_BYTES >> 20} MiB more than expected")
        elif how != " with exit code 0":
            verdicts.note(index, f"its process ended{how}")
        elif _lines(output.decode("utf-8", "replace")) != _lines(case["output"]):
            verdicts.note(index, "the output differs")
        else:
            verdicts.passed[index] = True
        _sweep()
        _clear_scratch()
        if how.endswith("processor time"):
            return


def _prepare(code: str, text: str) -> Any:
    """Write the program and its input, and return the open input file; raises OSError."""
    with open(_PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)
    given = open("input", "w+b")  # noqa: SIM115  the caller closes it
    given.write(text.encode("utf-8", "surrogatepass"))
    given.seek(0)
    return given


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def was_too_busy(*, used_s: float, allowed_s: float, waited_s: float, timeout_s: float, num_made: int) -> bool:
    """Return whether a timeout was the machine's fault: the code had processor time left but waited for a processor.

    Code that sleeps does not wait for a processor. Code that fills the processors itself uses up its allowance. Code
    with many processes or threads waits for its own.
    """
    return used_s < allowed_s and waited_s > timeout_s / 2 and num_made < _MANY_TASKS


def _end_in_time(payload: dict[str, Any], verdicts: Verdicts) -> None:
    """Print the verdict when the time is up, if it has not been printed before."""
    note_waiting(1)
    waited_before_s, timeout_s = waited_s(), payload["timeout_s"]
    ends_at, last = time.monotonic() + timeout_s, 0
    while (left_s := ends_at - time.monotonic()) > 0:
        time.sleep(min(left_s, _LOOK_EVERY_S))
        last = max(last, last_number())  # the kernel starts again with low numbers after the highest
    waited = waited_s() - waited_before_s
    try:
        used, num_made = used_s(), max(last, num_tasks()) - num_noted() - 1  # minus this thread
    except OSError:  # the code keeps the judge from opening files
        used, num_made = float("inf"), _MANY_TASKS
    allowed_s = payload["cpu_s"] * num_noted()
    if was_too_busy(used_s=used, allowed_s=allowed_s, waited_s=waited, timeout_s=timeout_s, num_made=num_made):
        verdicts.say(
            unjudged=f"the machine was too busy: of {timeout_s:g} s its processes waited {waited:.1f} s for a "
            f"processor and used one for {used:.1f} s"
        )
    made = f", and it made {num_made} processes or threads" if num_made >= _MANY_TASKS else ""
    verdicts.why = verdicts.why or f"its tests took longer than {timeout_s:g} s{made}"
    verdicts.say()


def main() -> None:
    """Read the code and its tests from stdin, run the tests, and print the verdict."""
    payload = json.loads(sys.stdin.buffer.read())
    verdicts = Verdicts(payload["nonce"], len(payload["tests"]))
    if os.getpid() != 1 or ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        verdicts.say(unjudged="the judge is not isolated in its sandbox")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = io.StringIO()  # discards what tests print
    threading.Thread(target=_end_in_time, args=(payload, verdicts), daemon=True).start()
    try:
        (_run_asserts if payload["kind"] == "asserts" else _run_cases)(payload, verdicts)
    except BaseException as error:  # noqa: BLE001  before the code runs, the judge or the machine is at fault
        verdicts.give_up(f"{type(error).__name__}: {error}")
    verdicts.say()


if __name__ == "__main__":
    main()
