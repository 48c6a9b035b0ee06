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
