"""The steps themselves: their files are there, their tests are marked, and none is longer than ten minutes."""

import re
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import why_not
from benchmarks.gpu_check.machine import REPOSITORY, Gpu, Machine
from benchmarks.gpu_check.results import MEASURED
from benchmarks.gpu_check.steps import STEPS, Step
from tests import conftest

pytestmark = pytest.mark.unit

MACHINE = Machine([Gpu("Test 9000", 80.0, 79.0)] * 2, "570.1", {"torch": "2.13.0"})


def files_of(step: Step) -> list[Path]:
    return [REPOSITORY / word.partition("::")[0] for word in step.module if word.startswith("tests/")]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_names_what_exists(step: Step) -> None:
    assert 0 < step.minutes <= 10
    if step.module[0] == "pytest":
        (file,) = files_of(step)
        source = file.read_text(encoding="utf-8")
        assert "mark.gpu" in source
        for word in step.module:
            assert f"def {word.partition('::')[2]}" in source
    else:
        assert (REPOSITORY / step.module[0].replace(".", "/") / "__main__.py").exists()
        assert step.numbers


def test_the_page_has_every_step_in_order_with_its_gpus() -> None:
    page = (REPOSITORY / "docs" / "gpu-tests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (\d) \|", page, re.MULTILINE)
    assert rows == [(step.name, str(step.num_gpus)) for step in STEPS]


def test_every_file_with_tests_for_a_gpu_is_in_a_step() -> None:
    others = set((REPOSITORY / "tests").rglob("test_*.py")) - {Path(__file__)}
    assert {path for path in others if "pytest.mark.gpu" in path.read_text()} == {
        file for step in STEPS for file in files_of(step)
    }


def test_a_finding_is_read_under_the_name_by_which_tests_record_it() -> None:
    assert MEASURED == conftest.MEASURED


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Step("a", "", (), num_gpus=2), None),
        (Step("a", "", (), num_gpus=3), "needs 3 GPUs, there are 2"),
        (Step("a", "", (), packages=("vllm", "x")), "needs the package x"),
        (Step("a", "", (), gpu_gib=80), "needs 80 GiB of GPU memory, GPU 0 has 79.0 free"),
    ],
)
def test_a_machine_meets_the_conditions_of_a_step_or_it_is_said_why_not(step: Step, why: str | None) -> None:
    assert why_not(step, MACHINE, is_installed=lambda name: name == "vllm") == why
