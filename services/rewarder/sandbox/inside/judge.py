"""Process 1 of the sandbox: runs tests against code, and alone knows them, their expected values and the verdict.

    stdin --payload--> judge --calls, arguments--> tested code      assert lines: the judge evaluates them
                         |  <--plain data--------- (tested_code.py)
                         +-----stdin-------------> the program      input and output: the judge compares them
                         |  <--stdout------------- (a new process for each case)
                         +--nonce and verdict----> stdout

The code under test is another process. It never sees an assert line, so there is nothing in its reach to patch, to
overwrite or to print: a call gives plain data, which is compared here. As process 1 the judge cannot be killed from
inside, and it is not dumpable: its memory, its pipes and its environment are closed to processes of the same user.
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
_MAX_OUTPUT_BYTES = 1 << 20
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
"""Processes and threads that the code has made. A program of so many waits for itself."""


class Verdicts:
    """What has been found out so far; said once, by whoever comes first: the tests' end or that of the time."""

    def __init__(self, nonce: str, num_tests: int) -> None:
        self._nonce = nonce
        self._lock = threading.Lock()
        self._has_begun = False
        self.passed = [False] * num_tests
        self.why = ""

    def begin(self) -> None:
        """Say that the code runs from now on. Should the judge fall silent after that, it is the code's doing."""
        if not self._has_begun:
            self._has_begun = True
            os.write(1, json.dumps({"nonce": self._nonce, "begun": True}).encode() + b"\n")

    def note(self, index: int, why: str) -> None:
        """Remember why a test failed, if it is the first."""
        self.why = self.why or f"test {index + 1} of {len(self.passed)}: {why}"[:250]

    def give_up(self, why: str) -> None:
        """Say that there is no verdict; or, once the code runs, which tests it had passed when it made judging fail."""
        if not self._has_begun:
            self.say(unjudged=why[:200])
        self.why = self.why or why[:250]
        self.say()

    def say(self, **more: Any) -> None:
        """Say it, and end the sandbox."""
        with self._lock:
            said = {"nonce": self._nonce, "num_passed": sum(self.passed), "why": self.why, **more}
            os.write(1, json.dumps(said).encode() + b"\n")
            os._exit(0)


def _sweep() -> None:
    """End every other process of the sandbox, and wait until there is none: they count, and write, to their end."""
    if os.getpid() != 1:  # anywhere else it would end every process of this user
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _clear_scratch() -> None:
    """Remove what a program has left behind; what cannot be removed is in the way of its own cases only."""
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
            verdicts.say(unfit=f"test {index + 1} is no Python to that of the sandbox: {error}")
    code: TestedCode | None = None
    names: dict[str, Any] = {"__name__": "tests"}
    of_code: dict[str, Any] = {}
    for index, test in enumerate(compiled):
        try:
            if code is None:
                code = _started(payload, verdicts)
                # A name that a test has given to something else stays the tests': code that ends itself, and is
                # started again, does not get it back.
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
                return  # it cannot even be loaded, or does not end: so it would be with the other tests
            code = None
            _sweep()
        except BaseException as error:  # noqa: BLE001  a test fails as it likes
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
                raise  # nothing has been run that could be in the way
            verdicts.note(index, f"its program left no room for the next: {error}")
            continue
        with given:
            try:
                process = start([sys.executable, "-I", "-c", _RUN_PROGRAM.format(payload["cpu_s"])], stdin=given)
            except OSError as error:
                verdicts.give_up(f"no process could be started for the code: {error}")
                raise
        verdicts.begin()
        assert process.stdout is not None
        output = process.stdout.read(_MAX_OUTPUT_BYTES)
        is_too_much = len(output) == _MAX_OUTPUT_BYTES
        # It may take its time to end where others want the processor too. All of the tests' time bounds it.
        how = "" if is_too_much else how_it_ended(process, within_s=None)
        if is_too_much:
            verdicts.note(index, f"it printed {_MAX_OUTPUT_BYTES >> 20} MiB and more")
        elif how != " with exit code 0":
            verdicts.note(index, f"its process ended{how}")
        elif _lines(output.decode("utf-8", "replace")) != _lines(case["output"]):
            verdicts.note(index, "another output")
        else:
            verdicts.passed[index] = True
        _sweep()
        _clear_scratch()
        if how.endswith("processor time"):
            return


def _prepare(code: str, text: str) -> Any:
    """Write the program, and its input, and return that; raises OSError."""
    with open(_PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)
    given = open("input", "w+b")  # noqa: SIM115  closed by whoever starts the program
    given.write(text.encode("utf-8", "surrogatepass"))
    given.seek(0)
    return given


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def was_too_busy(*, used_s: float, allowed_s: float, waited_s: float, timeout_s: float, num_made: int) -> bool:
    """Whether a time that is up says nothing of the code: it had processor time left, and waited for a processor.

    Code that sleeps does not wait for one. Code that fills the processors itself uses up what it may. Code that has
    made many processes or threads waited for those.
    """
    return used_s < allowed_s and waited_s > timeout_s / 2 and num_made < _MANY_TASKS


def _end_in_time(payload: dict[str, Any], verdicts: Verdicts) -> None:
    """Say the verdict when the time is up, if nobody has said it before."""
    note_waiting(1)
    waited_before_s, timeout_s = waited_s(), payload["timeout_s"]
    ends_at, last = time.monotonic() + timeout_s, 0
    while (left_s := ends_at - time.monotonic()) > 0:
        time.sleep(min(left_s, _LOOK_EVERY_S))
        last = max(last, last_number())  # the kernel begins again with low numbers at its highest
    waited = waited_s() - waited_before_s
    try:
        used, num_made = used_s(), max(last, num_tasks()) - num_noted() - 1  # without this thread
    except OSError:  # the code has taken the judge's files away
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
    """Judge what is on stdin."""
    payload = json.loads(sys.stdin.buffer.read())
    verdicts = Verdicts(payload["nonce"], len(payload["tests"]))
    if os.getpid() != 1 or ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        verdicts.say(unjudged="the judge is not alone in its sandbox")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = io.StringIO()  # what tests print goes nowhere
    threading.Thread(target=_end_in_time, args=(payload, verdicts), daemon=True).start()
    try:
        (_run_asserts if payload["kind"] == "asserts" else _run_cases)(payload, verdicts)
    except BaseException as error:  # noqa: BLE001  ours, or the machine's, until the code runs
        verdicts.give_up(f"{type(error).__name__}: {error}")
    verdicts.say()


if __name__ == "__main__":
    main()
