"""Runs incarnations of the real trainer, in this process or in others, and reads the files that they leave."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.trainer.fence import take_over
from services.trainer.loop.assembly import assemble
from services.trainer.loop.training_loop import Ending, TrainingLoop
from services.trainer.run_context import RunContext
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices
from tests.trainer.warm_ranks import REPOSITORY, WarmRank, start_warm


def small_config(directory: Path, model: Path, **settings: Any) -> RunConfig:
    """Return the config of a run of six steps with two groups each, and write its data set to ``directory``."""
    rows = directory / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{number % 7}="}) + "\n" for number in range(20)))
    plain: dict[str, Any] = {
        "model": str(model),
        "dataset_name": str(rows),
        "reward_funcs": ["parity"],
        "num_generations": 4,
        "groups_per_step": 2,
        "max_steps": 6,
        "max_staleness": 1,
        "max_completion_length": 8,
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    return RunConfig.model_validate(plain | settings)


async def create(redis: Redis, config: RunConfig, directory: Path) -> None:
    """Create the run with ``directory / "run"`` as its directory."""
    await RunStore(redis).create(RUN_ID, config, run_dir=str(directory / "run"))


async def train(
    redis: Redis,
    *,
    played: PlayedServices,
    sender: FakeSender,
    terminate: asyncio.Event | None = None,
    meddle: Callable[[TrainingLoop], None] = lambda loop: None,
) -> tuple[Ending, TrainingLoop]:
    """Run one incarnation of the trainer to its end. ``meddle`` may change the loop before it begins."""
    store = RunStore(redis)
    record = await store.get(RUN_ID)
    assert record is not None
    incarnation = await take_over(redis, RunKeys(RUN_ID))
    loop = await assemble(RunContext(redis, store, record, incarnation), sender, terminate=terminate or asyncio.Event())
    loop.intake.pace.test_group_every_s = 0.2
    meddle(loop)
    services = asyncio.create_task(played.play(), name="played services")
    try:
        async with asyncio.timeout(120):
            ending = await loop.run()
    finally:
        services.cancel()
    return ending, loop


@asynccontextmanager
async def rank_process(
    redis_url: str,
    run_id: str,
    directory: Path,
    *,
    module: str = "services.trainer.rank",
    is_cold: bool = False,
    **variables: str,
) -> AsyncGenerator[asyncio.subprocess.Process | WarmRank]:
    """Run one training rank as a process; its output is in ``directory / RUN_ID.log``.

    Args:
        redis_url: The run's Redis.
        run_id: The run's id.
        directory: The directory of runs.
        module: The module to start instead of the rank itself.
        is_cold: Start a new interpreter, which imports torch again.
        variables: Additional environment variables.
    """
    own = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_RUNS_DIR": str(directory), **variables}
    environment = {**os.environ, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = directory / f"{run_id}.log"
    process: asyncio.subprocess.Process | WarmRank
    if is_cold:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, run_id), cwd=REPOSITORY, env=environment, stdout=output, stderr=output
            )
    else:
        process = await start_warm(module, run_id, environment=environment, log=log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def trained_groups(run_dir: Path) -> dict[int, list[int]]:
    """Return the groups of each step, from the rollout log."""
    steps: dict[int, list[int]] = {}
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        rows = json_lines(path)
        steps[rows[0]["step"]] = sorted({int(row["group_id"]) for row in rows})
    return steps


def newest_ledger(run_dir: Path) -> dict[str, Any]:
    """Return the ledger of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step_*"))
    state = json.loads((newest / "trainer_state.json").read_text())
    ledger: dict[str, Any] = state["extra"]["ledger"]
    return ledger


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log of the run."""
    return [json.loads(line) for line in path.read_text().splitlines()]
