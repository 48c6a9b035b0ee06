"""If a function needs more memory than its worker has, the message says how much that is. Real worker processes."""

from pathlib import Path

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import WeightedFunction
from shared.user_code.places import Places
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


async def test_the_error_of_a_function_that_runs_out_of_memory_names_the_limit_and_its_setting(
    metrics: RewarderMetrics, tmp_path: Path
) -> None:
    (tmp_path / "hogging_rewards.py").write_text(HOG)
    tasks = RewardTasks(Places((str(tmp_path),)))
    async with pool_and_scorer(metrics, tasks) as (_, scorer):
        functions = [WeightedFunction("hogging_rewards:hog")]
        ((outcome,),) = await scorer.score(call_with("a"), functions, timeout_s=60, lane="test")
    assert outcome.outcome == "error"
    assert outcome.detail == "MemoryError (a worker has 4096 MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"


async def test_a_module_that_finds_no_memory_beside_others_gets_a_worker_of_its_own(
    metrics: RewarderMetrics, tmp_path: Path
) -> None:
    async with pool_and_scorer(metrics, RewardTasks(Places((str(tmp_path),)))) as (_, scorer):
        for number in range(6):  # two workers of 4 GiB
            (tmp_path / f"table_{number}.py").write_text(TABLE)
            functions = [WeightedFunction(f"table_{number}:size")]
            ((outcome,),) = await scorer.score(call_with("a"), functions, timeout_s=60, lane="test")
            assert (outcome.outcome, outcome.value) == ("scored", 1500 << 20), outcome.detail
