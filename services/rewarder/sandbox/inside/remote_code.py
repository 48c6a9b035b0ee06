"""Lets the judge use the code under test: holds the code's process, and proxies for the objects in it.

    judge --RemoteObject(...)--> TestedCode --a line of JSON--> tested_code.py, in a process of its own

Replies are decoded into plain data or proxies, and nothing else is checked. A reply may contain wrong values, but it
cannot run anything in the judge.
"""

import builtins
import contextlib
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

from services.rewarder.sandbox.inside.plain_data import decode, encode
from services.rewarder.sandbox.inside.processor_time import note_waiting

_MAX_REPLY_BYTES = 16 << 20
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Without this, numpy starts one thread per processor, which may be more threads than the code is allowed."""


class CodeGoneError(BaseException):
    """The tested code cannot be loaded, or its process is lost. Not an Exception, so that tests do not catch it."""


class UnfitTestError(BaseException):
    """A test does something that is not possible across processes, such as passing an object that is not plain data."""


class CodeRaisedError(Exception):
    """The tested code raised an exception that the judge cannot rebuild, such as an exception of its own class."""


class RemoteObject:
    """A proxy for an object in the tested code's process. It never equals anything else, whatever the object claims."""

    def __init__(self, code: "TestedCode", number: int) -> None:
        self.__dict__["_code"] = code
        self.__dict__["_number"] = number

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_code"].ask(do, self.__dict__["_number"], args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the tested code's process, and return the result or raise the exception."""
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
            few = iterator._ask("next")  # noqa: SLF001  an object of this class
            if not few:
                return
            yield few[0]

    def __next__(self) -> Any:
        few = self._ask("next")
        if not few:
            raise StopIteration
        return few[0]


class TestedCode:
    """The process that runs the code under test, and the names that the code defines."""

    def __init__(self, process: "subprocess.Popen[bytes]", code: str, cpu_s: int) -> None:
        self.gone: CodeGoneError | None = None
        self.process = process
        self.names: dict[str, Any] = {}
        reply = self._exchange({"code": code, "cpu_s": cpu_s})
        if "raised" in reply:
            raise CodeGoneError(": ".join(str(part) for part in reply["raised"]))
        self.names = self._names(reply["names"])

    def ask(self, do: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send a request to the tested code's process; return the result, or raise the exception of the tested code."""
        request = {
            "do": do,
            "of": number,
            "args": [encode(item, self._number_of) for item in args],
            "kwargs": {name: encode(item, self._number_of) for name, item in kwargs.items()},
        }
        reply = self._exchange(request)
        if "raised" in reply:
            raise _rebuilt(*(str(part) for part in reply["raised"]))
        try:
            for given, changed in zip(args, reply.get("args") or [], strict=False):
                if changed is not None:
                    _take_over(given, decode(changed, self._object_of))
            return decode(reply["value"], self._object_of)
        except Exception as error:
            raise self._lost(f"sent an invalid reply: {type(error).__name__}") from error

    def check(self) -> None:
        """Raise CodeGoneError if the code's process has been lost, even if a test caught that exception."""
        if self.gone is not None:
            raise self.gone

    def _lost(self, why: str) -> CodeGoneError:
        """Record that the code's process is lost, and return the exception to raise.

        A test that catches the exception cannot hide the loss: ``check`` raises it again.
        """
        self.gone = CodeGoneError(why)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent data does not matter any more
                pipe.close()
        return self.gone

    def _names(self, said: Any) -> dict[str, Any]:
        """Return the names of the tested code for use in tests, except names of built-ins and standard library modules.

        A module of the standard library that the code imports is imported here.
        """
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
            raise CodeGoneError(f"sent an invalid reply: {type(error).__name__}") from error
        return found

    def _object_of(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)

    def _number_of(self, value: Any) -> int:
        if isinstance(value, RemoteObject):
            return int(value.__dict__["_number"])
        if any(value is given for given in self.names.values()):
            raise TypeError(f"the code gives the test {type(value).__name__} where it needs a value to pass back")
        raise UnfitTestError(f"passes {type(value).__name__} to the code; only plain data can be passed")

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline(_MAX_REPLY_BYTES)
            reply: Any = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            if len(line) == _MAX_REPLY_BYTES:
                raise self._lost(f"its values take {_MAX_REPLY_BYTES >> 20} MiB or more")
            raise self._lost(f"its process ended{how_it_ended(self.process)}")
        return cast("dict[str, Any]", reply)


def _rebuilt(kind: str, message: str) -> Exception:
    """Rebuild an exception of the tested code from its name and message, the only parts that were sent."""
    known = getattr(builtins, kind, None)
    # StopIteration would silently end a loop in the test, and skip the loop's remaining assertions.
    if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
        with contextlib.suppress(TypeError):  # an ExceptionGroup cannot be made without its members
            error: Exception = known.__new__(known)
            with contextlib.suppress(TypeError):  # UnicodeDecodeError, for example, needs more than a message
                error = known(message)
            error.args = (message,)
            return error
    return CodeRaisedError(f"{kind}: {message}")


def _take_over(given: Any, changed: Any) -> None:
    if isinstance(given, list):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


def start(command: list[str], stdin: Any) -> "subprocess.Popen[bytes]":
    """Start a process in its own session, with a pipe for its output; raises OSError."""
    process = subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    note_waiting(process.pid)
    return process


def how_it_ended(process: "subprocess.Popen[bytes]", *, within_s: float | None = 1.0) -> str:
    """Return how a process ended, as text after "its process ended"; empty if it has not ended within ``within_s``."""
    note_waiting(process.pid)
    try:
        code = process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return ""
    if code == -signal.SIGXCPU:
        return ", out of processor time"
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"
