"""math-verify through the rewarder's workers, compared with the same function in one plain process.

workers of the pool <-- groups of 8 -- Scorer          in turn with
a single plain process, which calls the function directly
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path

from benchmarks.bench_rewarder.groups import Problem
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from services.rewarder.settings import RewarderSettings
from shared.user_code.limits import Limits
from shared.user_code.places import Places

FUNCTION = "accuracy_reward"
TIMEOUT_S = 60.0
_REPOSITORY = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def scorer(num_workers: int) -> AsyncGenerator[Scorer]:
    """Start reward workers as the rewarder does."""
    settings = RewarderSettings.model_construct()
    metrics = RewarderMetrics()
    loop_functions = LoopFunctions(places=Places(), import_timeout_s=settings.import_timeout_s)
    async with RewardPool(
        RewardTasks(),
        num_workers=num_workers,
        limits=Limits(settings.worker_memory_mib << 20, settings.worker_open_files),
        queue_timeout_s=settings.queue_timeout_s,
        import_timeout_s=settings.import_timeout_s,
        metrics=metrics,
    ) as pool:
        functions = PythonFunctions(
            pool,
            loop_functions=loop_functions,
            import_timeout_s=settings.import_timeout_s,
            check_timeout_s=settings.check_timeout_s,
        )
        try:
            yield Scorer(functions, metrics=metrics)
        finally:
            await functions.close()


async def pool_rate(using: Scorer, problems: Sequence[Problem], *, group_size: int) -> float:
    """Return answers per second, with all groups submitted at once. Exits if an answer is judged wrong."""
    began_at = time.perf_counter()
    values = await judge(using, problems, group_size=group_size)
    seconds = time.perf_counter() - began_at
    wrong = [
        problem.completion
        for problem, value in zip(problems, values, strict=True)
        if value is None or value != problem.value
    ]
    if wrong:
        raise SystemExit(f"{len(wrong)} answers were judged wrong, the first of them {wrong[0]!r}")
    return len(problems) / seconds


async def judge(using: Scorer, problems: Sequence[Problem], *, group_size: int) -> list[float | None]:
    """Return the value of each answer; None if it has no score."""
    groups = [problems[start : start + group_size] for start in range(0, len(problems), group_size)]
    outcomes = await asyncio.gather(
        *(
            using.score(_call(group), [WeightedFunction(FUNCTION)], timeout_s=TIMEOUT_S, lane="run-bench")
            for group in groups
        )
    )
    return [row[0].value for rows in outcomes for row in rows]


class SingleProcess:
    """One plain process that calls the function in its main thread."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def rate(self, problems: Sequence[Problem], *, group_size: int) -> float:
        """Return answers per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        rows = [[problem.solution, problem.completion] for problem in problems]
        self._process.stdin.write(json.dumps([group_size, rows]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the single process of math-verify ended")
        return len(problems) / float(answer)


@contextlib.contextmanager
def single_process() -> Generator[SingleProcess]:
    """Start the process, and kill it when the context ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bench_rewarder.single_process"],
        cwd=_REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield SingleProcess(process)
    finally:
        process.kill()
        process.communicate()


def _call(group: Sequence[Problem]) -> RewardCall:
    return RewardCall(
        prompts=["What is it?"] * len(group),
        completions=[problem.completion for problem in group],
        columns={"solution": [problem.solution for problem in group]},
    )
