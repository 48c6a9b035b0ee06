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

import builtins
import ctypes
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

from services.rewarder.sandbox.inside.plain_data import decode, encode

_PR_SET_DUMPABLE = 4
_MAX_REPLY_BYTES = 4 << 20
_MAX_OUTPUT_BYTES = 1 << 20
_PROGRAM = "program.py"
_RUN_PROGRAM = (
    "import resource, runpy; resource.setrlimit(resource.RLIMIT_CPU, ({0}, {0} + 1)); del resource; "
    "runpy.run_path('program.py', run_name='__main__')"
)


class CodeGoneError(BaseException):
    """The process of the code has ended or says nonsense; not an Exception, so that no test takes it for one."""


class UnfitTestError(BaseException):
    """A test asks for what cannot be asked of another process."""


class CodeRaisedError(Exception):
    """The code raised an exception of its own making."""


class RemoteObject:
    """An object in the process of the code. Compared with anything else it is another thing, whatever it says."""

    def __init__(self, code: "TestedCode", number: int) -> None:
        self.__dict__["_code"] = code
        self.__dict__["_number"] = number

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_code"].ask(do, self.__dict__["_number"], args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, in the process of the code."""
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        while True:
            few = iterator._ask("next")  # noqa: SLF001  of the same class
            if not few:
                return
            yield few[0]

    def __next__(self) -> Any:
        few = self._ask("next")
        if not few:
            raise StopIteration
        return few[0]


class TestedCode:
    """The process of the code, and what it has defined."""

    def __init__(self, program: str, code: str, cpu_s: int) -> None:
        self.gone: CodeGoneError | None = None
        self.process = _start([sys.executable, "-I", "-c", program], stdin=subprocess.PIPE)
        reply = self._exchange({"code": code, "cpu_s": cpu_s})
        if "raised" in reply:
            raise CodeGoneError(": ".join(str(part) for part in reply["raised"]))
        self.names = self._names(reply["names"])

    def ask(self, do: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the code's process answers, or raise what it raised."""
        request = {
            "do": do,
            "of": number,
            "args": [encode(item, _number_of) for item in args],
            "kwargs": {name: encode(item, _number_of) for name, item in kwargs.items()},
        }
        reply = self._exchange(request)
        if "raised" in reply:
            kind, message = (str(part) for part in reply["raised"])
            known = getattr(builtins, kind, None)
            # StopIteration would end a loop of the test that calls the code, and with it what the loop asserts.
            if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
                raise known(message)
            raise CodeRaisedError(f"{kind}: {message}")
        try:
            for given, changed in zip(args, reply.get("args") or [], strict=False):
                if changed is not None:
                    _take_over(given, decode(changed, self._object_of))
            return decode(reply["value"], self._object_of)
        except Exception as error:
            raise self._lost(f"answered nonsense: {type(error).__name__}") from error

    def _lost(self, why: str) -> CodeGoneError:
        """Remember that the code is gone, whatever the test makes of the exception."""
        self.gone = CodeGoneError(why)
        return self.gone

    def _names(self, said: Any) -> dict[str, Any]:
        """Return what tests may use: nothing that is called like something of Python's own."""
        found: dict[str, Any] = {}
        try:
            for name, (kind, value) in said.items():
                if hasattr(builtins, name) or name.startswith("__"):
                    continue
                if kind == "module":
                    if value in sys.stdlib_module_names:
                        found[name] = importlib.import_module(value)
                elif name not in sys.stdlib_module_names:
                    found[name] = decode(value, self._object_of)
        except Exception as error:
            raise CodeGoneError(f"answered nonsense: {type(error).__name__}") from error
        return found

    def _object_of(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline(_MAX_REPLY_BYTES)
            reply: Any = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self._lost(f"its process ended{_how(self.process)}")
        return cast("dict[str, Any]", reply)


class Verdicts:
    """What has been found out so far; said once, by whoever comes first: the tests' end or that of the time."""

    def __init__(self, nonce: str, num_tests: int) -> None:
        self._nonce = nonce
        self._lock = threading.Lock()
        self.passed = [False] * num_tests
        self.why = ""

    def note(self, index: int, why: str) -> None:
        """Remember why a test failed, if it is the first."""
        self.why = self.why or f"test {index + 1} of {len(self.passed)}: {why}"[:250]

    def say(self, **more: Any) -> None:
        """Say it, and end the sandbox."""
        with self._lock:
            said = {"nonce": self._nonce, "num_passed": sum(self.passed), "why": self.why, **more}
            os.write(1, json.dumps(said).encode() + b"\n")
            os._exit(0)


def _number_of(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return int(value.__dict__["_number"])
    raise UnfitTestError(f"passes {type(value).__name__} to the code; only plain data can be passed")


def _take_over(given: Any, changed: Any) -> None:
    if isinstance(given, list):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


def _start(command: list[str], stdin: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, start_new_session=True
    )


def _how(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return ""
    if code == -signal.SIGXCPU:
        return ", out of processor time"
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"


def _sweep() -> None:
    """End every other process of the sandbox. Never call it where this is not process 1."""
    try:
        os.kill(-1, signal.SIGKILL)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except (ProcessLookupError, ChildProcessError):
        pass


def _run_asserts(payload: dict[str, Any], verdicts: Verdicts) -> None:
    compiled: list[Any] = []
    for index, test in enumerate(payload["tests"]):
        try:
            compiled.append(compile(test, "<test>", "exec"))
        except (SyntaxError, ValueError, RecursionError) as error:
            verdicts.say(unfit=f"test {index + 1} is no Python: {error}")
    code: TestedCode | None = None
    names: dict[str, Any] = {"__name__": "tests"}
    of_code: dict[str, Any] = {}
    for index, test in enumerate(compiled):
        try:
            if code is None:
                code = TestedCode(payload["tested_code"], payload["code"], payload["cpu_s"])
                # A name that a test has given to something else stays the tests': code that ends itself, and is
                # started again, does not get it back.
                free = [name for name in code.names if name not in names or names[name] is of_code.get(name, names)]
                of_code = {name: code.names[name] for name in free}
                names |= of_code
            exec(test, names)
            if code.gone is not None:
                raise code.gone
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


def _run_cases(payload: dict[str, Any], verdicts: Verdicts) -> None:
    for index, case in enumerate(payload["tests"]):
        with open(_PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(payload["code"])
        with open("input", "w+b") as given:
            given.write(case["input"].encode("utf-8", "surrogatepass"))
            given.seek(0)
            process = _start([sys.executable, "-I", "-c", _RUN_PROGRAM.format(payload["cpu_s"])], stdin=given)
        assert process.stdout is not None
        output = process.stdout.read(_MAX_OUTPUT_BYTES)
        how = _how(process)
        if how != " with exit code 0":
            verdicts.note(index, f"its process ended{how}")
        elif _lines(output.decode("utf-8", "replace")) != _lines(case["output"]):
            verdicts.note(index, "another output")
        else:
            verdicts.passed[index] = True
        _sweep()
        if how.endswith("processor time"):
            return


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def main() -> None:
    """Judge what is on stdin."""
    payload = json.loads(sys.stdin.buffer.read())
    verdicts = Verdicts(payload["nonce"], len(payload["tests"]))
    if os.getpid() != 1 or ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        verdicts.say(unjudged="the judge is not alone in its sandbox")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = io.StringIO()  # what tests print goes nowhere

    def end() -> None:
        time.sleep(payload["timeout_s"])
        verdicts.why = verdicts.why or f"its tests took longer than {payload['timeout_s']:g} s"
        verdicts.say()

    threading.Thread(target=end, daemon=True).start()
    try:
        (_run_asserts if payload["kind"] == "asserts" else _run_cases)(payload, verdicts)
    except BaseException as error:  # noqa: BLE001  ours, or the machine's
        verdicts.say(unjudged=f"{type(error).__name__}: {error}"[:200])
    verdicts.say()


if __name__ == "__main__":
    main()
