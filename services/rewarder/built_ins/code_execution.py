"""Runs the code of a completion against the tests of its row, always in a sandbox.

    completion --last fenced block--> code --+
    row ---------column `tests`----> tests --+--> sandbox: judge | tested code --> which tests passed

Tests are Python statements, usually asserts, or cases of ``{"input": ..., "output": ...}``. The code cannot pass
asserts by printing, exiting or patching; see sandbox/inside/judge.py. Without a sandbox every outcome is an error.
"""

import ast
import asyncio
import contextlib
import json
import re
import secrets
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.rewarder.built_ins.fenced_blocks import fenced_blocks
from services.rewarder.reward_call import Verdict, everyone, text_of
from services.rewarder.sandbox import inside
from services.rewarder.sandbox.chosen import num_at_once, usable_sandbox
from services.rewarder.sandbox.sandbox import Limits, Sandbox, SandboxUnavailableError
from shared.messages import Completion
from shared.user_code.error_text import printable

_PYTHON = ("python", "python3", "py")
TIMEOUT_S, CPU_S, MEMORY_MIB = 10.0, 3, 512
_WALL_SPARE_S = 20.0
"""Seconds added to the time of the tests for starting and ending the sandbox. The judge limits the tests itself."""
_INSIDE = Path(inside.__file__).parent
_OUR_IMPORTS = re.compile(r"^from services\.rewarder\.sandbox\.inside\.\w+ import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)


@dataclass(frozen=True)
class RowTests:
    """The tests of one dataset row. ``kind`` is "asserts" for Python statements, or "cases" for inputs with outputs."""

    kind: str
    tests: list[Any]


def code_execution_reward(
    completions: list[Completion],
    tests: list[object],
    partial_credit: bool = True,
    timeout_s: float = TIMEOUT_S,
    cpu_s: int = CPU_S,
    memory_mib: int = MEMORY_MIB,
    **_columns: object,
) -> list[Verdict]:
    """Score each completion: the share of its row's tests that its code passes in a sandbox.

    Args:
        completions: Completions with code in a fenced block.
        tests: The tests of each completion's row.
        partial_credit: Whether the reward is the share of passed tests. If not, it is 1.0 if all tests pass, else 0.0.
        timeout_s: Wall-clock limit for all tests of a completion together, in seconds.
        cpu_s: Limit on the processor time of each process of the code, in seconds.
        memory_mib: Limit on the address space of each process, in MiB.
    """
    limits = _limits(timeout_s, cpu_s, memory_mib)

    async def judge_all() -> list[Verdict]:
        try:
            sandbox = await usable_sandbox()
        except SandboxUnavailableError as error:
            return everyone(len(completions), "error", f"no sandbox to run code in: {error}")
        if why_not := sandbox.why_too_much(limits):
            return everyone(len(completions), "error", why_not)
        places = asyncio.Semaphore(num_at_once())

        async def judge(completion: Completion, row_tests: object) -> Verdict:
            async with places:
                return await _judge(
                    sandbox,
                    text_of(completion),
                    row_tests,
                    limits=limits,
                    budget={"timeout_s": timeout_s, "cpu_s": cpu_s},
                    partial_credit=partial_credit,
                )

        async with asyncio.TaskGroup() as group:
            judging = [
                group.create_task(judge(*pair), name=f"judge of completion {index}")
                for index, pair in enumerate(zip(completions, tests, strict=True))
            ]
        return [task.result() for task in judging]

    return asyncio.run(judge_all())


def _limits(timeout_s: float, cpu_s: int, memory_mib: int) -> Limits:
    """Return the sandbox's limits, with extra time for the judge: the process there that runs the tests of the code."""
    return Limits(wall_s=timeout_s + _WALL_SPARE_S, cpu_s=int(timeout_s) + cpu_s + 1, memory_bytes=memory_mib << 20)


def check_sandbox(kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why code cannot be run with these options, or None after a successful test of the sandbox."""
    try:
        sandbox = asyncio.run(usable_sandbox())
    except SandboxUnavailableError as error:
        return f"has no sandbox to run code in: {error}"
    return sandbox.why_too_much(
        _limits(kwargs.get("timeout_s", TIMEOUT_S), kwargs.get("cpu_s", CPU_S), kwargs.get("memory_mib", MEMORY_MIB))
    )


def code_of(text: str) -> str | None:
    """Return the last fenced block marked as Python, else the last block without a language, else None."""
    blocks = fenced_blocks(text)
    of_python = [block.content for block in blocks if block.language in _PYTHON]
    unnamed = [block.content for block in blocks if not block.language]
    code = next(reversed(of_python or unnamed), None)
    return None if code is None else textwrap.dedent(code)


def read_tests(row: object) -> RowTests | str:
    """Return the tests of a row, or the reason why it has no usable tests."""
    if isinstance(row, str):
        try:
            decoded: object = json.loads(row)
        except (ValueError, RecursionError):
            decoded = [row]  # Python statements
        row = decoded
    if not isinstance(row, list) or not row:
        return "the row has no tests"
    tests = cast("list[object]", row)
    if all(isinstance(test, str) for test in tests):
        asserts = cast("list[str]", tests)
        return _why_no_python(asserts) or RowTests("asserts", asserts)
    cases: list[Any] = []
    for test in tests:
        case = cast("dict[str, object]", test) if isinstance(test, dict) else {}
        texts = [_text(case.get(key)) for key in ("input", "output")]
        if None in texts:
            return "the row's tests must all be text, or all be tables of input and output"
        if len(str(texts[0]).encode("utf-8", "surrogatepass")) > Limits.file_bytes:
            return f"the row's tests cannot be used: an input is larger than {Limits.file_bytes >> 20} MiB"
        cases.append({"input": texts[0], "output": texts[1]})
    return RowTests("cases", cases)


def _why_no_python(tests: list[str]) -> str | None:
    num_without_effect = 0
    for number, test in enumerate(tests, start=1):
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(test, "<test>", "exec")
                is_value = _is_value(test)
                num_without_effect += all(map(_has_no_effect, ast.parse(test).body))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"the row's tests cannot be used: test {number} is not valid Python: {error}"
        if is_value:
            return f"the row's tests cannot be used: test {number} is only a value, which tests nothing"
    return "the row has no tests" if num_without_effect == len(tests) else None


def _has_no_effect(statement: ast.stmt) -> bool:
    """Return whether a statement never fails: ``pass``, or a text."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Pass)


def _is_value(test: str) -> bool:
    """Return whether a test is only a value, such as the JSON text of an object. All code would pass it."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            read(test)
            return True
    return False


def _text(value: object) -> str | None:
    if isinstance(value, list) and all(isinstance(line, str) for line in cast("list[object]", value)):
        return "\n".join(cast("list[str]", value))
    return value if isinstance(value, str) else None


async def _judge(
    sandbox: Sandbox,
    text: str,
    row: object,
    *,
    limits: Limits,
    budget: dict[str, Any],
    partial_credit: bool,
) -> Verdict:
    tests = read_tests(row)
    if isinstance(tests, str):
        return Verdict("not_applicable", None, printable(tests))
    code = code_of(text)
    if code is None:
        return Verdict("scored", 0.0, "it has no fenced block of Python", _components(0, len(tests.tests)))
    nonce = secrets.token_hex(16)
    payload = budget | {"nonce": nonce, "kind": tests.kind, "tests": tests.tests, "code": code, "tested_code": _TESTED}
    try:
        finished = await sandbox.run(_JUDGE, stdin=json.dumps(payload).encode(), limits=limits)
    except SandboxUnavailableError as error:
        return Verdict("error", None, printable(f"no sandbox to run code in: {error}"))
    said = _said(finished.stdout, nonce)
    if said is None or said.keys() == {"nonce", "begun"}:
        signal = max(0, -(finished.exit_code or 0))  # killed bwrap itself, so it was sent from outside the sandbox
        how = f"signal {signal}" if signal else finished.ended
        if said is not None and not signal:
            return Verdict("scored", 0.0, f"it made its judge fail ({how})", _components(0, len(tests.tests)))
        complaint = " ".join(finished.stderr.decode("utf-8", "replace").split())
        return Verdict("error", None, printable(f"the sandbox ended without a verdict ({how}): {complaint}"))
    if "unfit" in said:
        return Verdict("error", None, printable(f"the row's tests cannot be used: {said['unfit']}"))
    if "unjudged" in said:
        return Verdict("error", None, printable(f"the sandbox gave no verdict: {said['unjudged']}"))
    num_passed, num_tests = int(said["num_passed"]), len(tests.tests)
    value = num_passed / num_tests if partial_credit else float(num_passed == num_tests)
    return Verdict("scored", value, printable(str(said["why"])), _components(num_passed, num_tests))


def _components(num_passed: int, num_tests: int) -> dict[str, float]:
    return {"tests_passed": float(num_passed), "tests": float(num_tests)}


def _said(stdout: bytes, nonce: str) -> dict[str, Any] | None:
    """Return the judge's last message: the verdict, or a note that the code has started. None if there is no message.

    A message is a line of JSON with the nonce, which only the judge knows, so the tested code cannot forge it.
    """
    last: dict[str, Any] | None = None
    for line in stdout.splitlines():
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and cast("dict[str, Any]", said).get("nonce") == nonce:
            last = cast("dict[str, Any]", said)
    return last


def _program(*names: str) -> str:
    """Join modules into one program text for the sandbox, where our modules cannot be imported."""
    return "\n".join(_OUR_IMPORTS.sub("", (_INSIDE / name).read_text(encoding="utf-8")) for name in names)


_JUDGE = _program("plain_data.py", "processor_time.py", "remote_code.py", "judge.py")
_TESTED = _program("plain_data.py", "tested_code.py")
