"""The table of problem types in http-api.md has every problem that a client may get."""

import ast
import re
from pathlib import Path

import pytest

from tests.documentation.page_blocks import ROOT

pytestmark = pytest.mark.unit

_CALLS = frozenset({"Problem", "RewardProblem", "problem"})
_INTERNAL = frozenset({"not-checked", "turns-refused"})
"""Answers of a generator to the other services."""
_UNHEARD = frozenset({"hung-up", "incomplete-body"})
"""For the log: the client has closed the connection."""


def _documented() -> dict[str, set[str]]:
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", page.partition("\n## Errors\n")[2], re.MULTILINE)
    return {status: set(re.findall(r"`([a-z-]+)`", types)) for status, types in rows}


def _raised() -> set[tuple[str, str, str]]:
    found: set[tuple[str, str, str]] = set()
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id=name), args=[ast.Constant(value=int(status)), ast.Constant(value=str(title)), *_]
                ) if name in _CALLS:
                    found.add((str(status), "-".join(title.lower().split()), _place(path, node)))
                case ast.Return(
                    value=ast.Tuple(elts=[ast.Constant(value=int(status)), ast.Constant(value=str(title)), *_])
                ) if "session_routes" in path.name:
                    found.add((str(status), "-".join(title.lower().split()), _place(path, node)))
                case _:
                    pass
    return found


def _place(path: Path, node: ast.expr | ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_problem_is_in_the_table() -> None:
    documented, raised = _documented(), _raised()
    assert len(raised) > 60
    missing = [
        f"{place}: {status} {name}"
        for status, name, place in sorted(raised)
        if name not in _INTERNAL | _UNHEARD and name not in documented.get(status, ())
    ]
    assert missing == []
