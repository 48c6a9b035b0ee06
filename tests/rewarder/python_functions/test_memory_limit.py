"""If a function needs more memory than its worker has, the message says how much that is. Real worker processes."""

import errno
from pathlib import Path

import pytest

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import WeightedFunction
from shared.errors import UserError
from shared.user_code.limits import is_out_of_memory
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused
from tests.rewarder.conftest import call_with, pool_and_scorer

HOG = """
def hog(completions, **_):
    return [float(len(bytearray(20 << 30))) for _ in completions]
"""

TABLE = """
table = bytearray(1500 << 20)
def size(completions, **_):
    return [float(len(table)) for _ in completions]
"""

LAZY_TABLE = """
table = b""
def size(completions, **_):
    global table
    table = table or bytearray(1500 << 20)
    return [float(len(table)) for _ in completions]
"""

KEEPING = """
kept = []
def keeps(completions, **_):
    kept.append(bytes(1500 << 20))
    return [1.0 for _ in completions]
"""

UNMAPPED = """
raise ImportError("libtorch.so: failed to map segment from shared object")
"""
LIMIT = "(a worker has 4096 MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"


async def test_the_error_of_a_function_that_runs_out_of_memory_names_the_limit_and_its_setting(
    metrics: RewarderMetrics, tmp_path: Path
) -> None:
    (tmp_path / "hogging_rewards.py").write_text(HOG)
    tasks = RewardTasks(Places((str(tmp_path),)))
    async with pool_and_scorer(metrics, tasks) as (_, scorer):
        functions = [WeightedFunction("hogging_rewards:hog")]
        ((outcome,),) = await scorer.score(call_with("a"), functions, timeout_s=60, lane="test")
    assert outcome.outcome == "error"
    assert outcome.detail == f"MemoryError {LIMIT}"


async def test_a_library_that_finds_no_memory_names_the_limit_too(metrics: RewarderMetrics, tmp_path: Path) -> None:
    (tmp_path / "unmapped_rewards.py").write_text(UNMAPPED)
    async with pool_and_scorer(metrics, RewardTasks(Places((str(tmp_path),)))) as (_, scorer):
        (refused,) = (await scorer.check(["unmapped_rewards:f"])).values()
    says = "ImportError: libtorch.so: failed to map segment from shared object (unmapped_rewards.py, line 2)"
    assert refused == Refused(f"importing unmapped_rewards failed: {says} {LIMIT}")


def its_own_cause(error: Exception) -> Exception:
    """Return an exception as after ``raise error from error``."""
    error.__cause__ = error
    return error


def raised_from(cause: Exception) -> UserError:
    error = UserError("importing it failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (ImportError("libtorch.so: failed to map segment from shared object"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (ValueError("a completion said: can't allocate memory"), False),
        (raised_from(MemoryError()), True),
        (raised_from(ValueError()), False),
        (its_own_cause(ValueError()), False),
        (raised_from(its_own_cause(MemoryError())), True),
    ],
)
def test_what_python_the_linker_and_torch_raise_is_out_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


@pytest.mark.parametrize("code", [TABLE, LAZY_TABLE], ids=["at its import", "at its first call"])
async def test_a_module_that_finds_no_memory_beside_others_gets_a_worker_of_its_own(
    metrics: RewarderMetrics, tmp_path: Path, code: str
) -> None:
    async with pool_and_scorer(metrics, RewardTasks(Places((str(tmp_path),)))) as (_, scorer):
        for number in range(6):  # two workers of 4 GiB
            (tmp_path / f"table_{number}.py").write_text(code)
            functions = [WeightedFunction(f"table_{number}:size")]
            ((outcome,),) = await scorer.score(call_with("a"), functions, timeout_s=60, lane="test")
            assert (outcome.outcome, outcome.value) == ("scored", 1500 << 20), outcome.detail


async def test_a_worker_that_its_own_module_has_filled_is_replaced(metrics: RewarderMetrics, tmp_path: Path) -> None:
    (tmp_path / "keeping_rewards.py").write_text(KEEPING)
    functions = [WeightedFunction("keeping_rewards:keeps")]
    said: list[str] = []
    async with pool_and_scorer(metrics, RewardTasks(Places((str(tmp_path),)))) as (_, scorer):
        for _ in range(10):  # two workers of 4 GiB, for two calls each
            ((outcome,),) = await scorer.score(call_with("a"), functions, timeout_s=60, lane="test")
            said.append(outcome.outcome)
    assert said[0] == "scored"
    assert "error" in said, said
    assert "scored" in said[said.index("error") + 2 :], said
