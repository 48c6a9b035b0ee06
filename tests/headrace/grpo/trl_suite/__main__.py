"""Runs TRL's own tests/test_grpo_trainer.py against headrace's GRPOTrainer, through real services and a real vLLM.

    python -m tests.headrace.grpo.trl_suite TRL [--work DIR] [PYTEST ARGUMENTS...]    TRL: a checkout of huggingface/trl

Only the import of GRPOTrainer and GRPOConfig is changed in its file, and models and data are stand-ins
(stand_ins.py). Tests of what headrace does not have are left out with a reason (not_applicable.py). The last line is
JSON; docs/coming-from-trl.md has the result.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.headrace.grpo.trl_suite.stand_ins import make_stand_ins

_ROOT = Path(__file__).resolve().parents[4]
_IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"
_FILES = ("__init__.py", "testing_utils.py", "testing_constants.py", "test_grpo_trainer.py")
_CONFTEST = """
import ast
import pathlib
import pytest
from trl import import_utils
from tests_of_headrace import reason_of

# A checkout of TRL may ask for packages that the installed TRL does not know.
for node in ast.walk(ast.parse(pathlib.Path(__file__).with_name("trl_tests").joinpath("testing_utils.py").read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "trl.import_utils":
        for name in node.names:
            if not hasattr(import_utils, name.name):
                setattr(import_utils, name.name, lambda: False)

def pytest_collection_modifyitems(items):
    for item in items:
        if reason := reason_of(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"does not apply: {reason}"))
"""


def main() -> int:
    """Run the tests and return 0 if at least 80% of the applicable ones pass."""
    parser = argparse.ArgumentParser(prog="trl_suite")
    parser.add_argument("trl", type=Path, help="a checkout of github.com/huggingface/trl")
    parser.add_argument("--work", type=Path, default=None, help="directory to work in, which is kept")
    arguments, more = parser.parse_known_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="trl-suite-"))).absolute()
    hub, suite, report = work / "hub", work / "suite", work / "report.xml"
    make_stand_ins(hub)
    _copy_tests(arguments.trl / "tests", suite)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(suite), str(_ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
    }
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(suite), "-p", "no:cacheprovider"]
    command += ["-q", "--timeout", "300", f"--junitxml={report}", str(suite / "trl_tests"), *more]
    subprocess.run(command, cwd=hub, env=environment, check=False)
    return _report(report)


def _copy_tests(source: Path, suite: Path) -> None:
    package = suite / "trl_tests"  # under another name, because headrace's own package is called tests
    package.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        text = (source / name).read_text(encoding="utf-8")
        if name == "test_grpo_trainer.py":
            assert _IMPORT in text, "TRL's tests import the trainer in another way now"
            text = text.replace(_IMPORT, _IMPORT.replace("trl", "headrace"))
        (package / name).write_text(text, encoding="utf-8")
    (suite / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (suite / "tests_of_headrace.py").write_text(
        Path(__file__).with_name("not_applicable.py").read_text(encoding="utf-8"), encoding="utf-8"
    )


def _report(report: Path) -> int:
    """Print a line for each test that did not pass, and the counts as JSON."""
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if failed is not None:
            outcome, why = "failed", (failed.get("message") or "").splitlines()[0]
        elif skipped is not None:
            why = skipped.get("message") or ""
            outcome = "does not apply" if why.startswith("does not apply") else "skipped by TRL"
        else:
            outcome, why = "passed", ""
        outcomes[outcome] += 1
        if why:
            sys.stdout.write(f"{case.get('name')} | {outcome} | {why.removeprefix('does not apply: ')[:160]}\n")
    applicable = outcomes["passed"] + outcomes["failed"]
    share = outcomes["passed"] / applicable if applicable else 0.0
    sys.stdout.write(json.dumps({**outcomes, "applicable": applicable, "share_passed": round(share, 3)}) + "\n")
    return 0 if share >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
