"""Functions of one module that are checked together share an import, which may take seconds. Real worker processes."""

from pathlib import Path

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_answer import Inspected
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused
from tests.rewarder.conftest import pool_and_scorer

SLOW = """
import helping_rewards
with open({log!r}, "a") as log:
    log.write("imported\\n")

def first(completions, *, factor, **_):
    import late_rewards
    return [factor for _ in completions]
"""


async def test_a_check_imports_a_module_once_for_all_its_functions(metrics: RewarderMetrics, tmp_path: Path) -> None:
    log = tmp_path / "log"
    more = "\n".join(f"def f{number}(completions, **_): return [1.0]" for number in range(4))
    (tmp_path / "slow_rewards.py").write_text(f"{SLOW.format(log=str(log))}\n{more}\n")
    for name in ("helping_rewards", "late_rewards"):
        (tmp_path / f"{name}.py").write_text("factor = 1.0\n")
    names = [f"slow_rewards:{name}" for name in ("missing", "first", "f0", "f1", "f2", "f3")]
    async with pool_and_scorer(metrics, RewardTasks(Places((str(tmp_path),)))) as (_, scorer):
        found = await scorer.check(names, {"slow_rewards:first": {"factor": 2.0}})
        again = await scorer.check(["slow_rewards:first"])
    assert log.read_text() == "imported\n" * 2
    refused, *described = found.values()
    assert isinstance(refused, Refused)
    assert "has no function missing" in refused.detail
    inspected = [what for what in described if isinstance(what, Inspected)]
    assert len(inspected) == 5, described
    (sources,) = {what.sources for what in inspected}
    assert sources is not None
    assert [file.module for file in sources.files] == ["slow_rewards", "helping_rewards", "late_rewards"]
    (alone,) = again.values()
    assert isinstance(alone, Inspected)
    assert (alone.required_columns, inspected[0].required_columns) == ([["factor"]], [])
    assert alone.sources == sources
