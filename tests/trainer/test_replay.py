"""A run that is killed and resumed ends with bitwise the same weights as an uninterrupted run."""

import asyncio
import hashlib
import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.ranks.exit_status import ENDED
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import json_lines, newest_ledger, rank_process, small_config, trained_groups
from tests.trainer.scripted import ScriptedServices
from tests.trainer.tensor_files import load_file

WITHIN_S = 150
pytestmark = pytest.mark.timeout(600)

ONE_STEP: dict[str, Any] = {"max_steps": 10, "max_staleness": 1, "save_steps": 3}
SEVERAL_STEPS: dict[str, Any] = {
    "max_steps": 22,  # ends within a batch
    "num_iterations": 2,
    "steps_per_generation": 2,
    "max_staleness": 7,
    "save_steps": 4,
    "beta": 0.05,
    "scale_rewards": "batch",
}


async def to_the_end(redis_url: str, run_id: str, directory: Path, *, is_cold: bool = False) -> None:
    async with rank_process(redis_url, run_id, directory, is_cold=is_cold) as process, asyncio.timeout(WITHIN_S):
        assert await process.wait() == ENDED, (directory / f"{run_id}.log").read_text()


async def messages(redis: Redis, run_id: str) -> list[str]:
    """Return what the run's watchers were told in words."""
    entries: Any = await redis.xrange(RunKeys(run_id).events)  # nullable only in the stubs
    return [json.loads(fields[b"data"])["message"] for _, fields in entries if fields[b"kind"] == b"log"]


async def killed_at(step: int, services: ScriptedServices, redis_url: str, run_id: str, directory: Path) -> None:
    """Run a rank until it has made ``step`` steps, and kill it. It can make only few more steps before it is killed."""
    metrics = directory / run_id / "metrics.jsonl"
    async with rank_process(redis_url, run_id, directory) as process:
        await eventually(lambda: metrics.exists() and len(json_lines_so_far(metrics)) >= step, within_s=WITHIN_S)
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL, "it was not killed in time"
    services.publish_blocks(None)


def json_lines_so_far(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def digests(run_dir: Path, step: int) -> dict[str, str]:
    """Return a digest of every tensor of a checkpoint (weights, moments, random states), and of the exported model."""
    checkpoint = run_dir / "checkpoints" / f"step_{step:08d}"
    found: dict[str, str] = {}
    for file in [*checkpoint.rglob("*.safetensors"), run_dir / "model" / "model.safetensors"]:
        tensors = load_file(file)
        for name, tensor in tensors.items():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{file.relative_to(run_dir)}:{name}"] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.parametrize(("settings", "seed"), [(ONE_STEP, 1), (SEVERAL_STEPS, 2)], ids=["one step", "several steps"])
async def test_a_run_killed_at_a_random_step_and_resumed_ends_with_the_same_bits(
    settings: dict[str, Any], seed: int, redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    config: RunConfig = small_config(tmp_path, tiny_model, max_grad_norm=0.5, weight_decay=0.1, **settings)
    two_batches = 2 * config.steps_per_batch()
    kill_at = random.Random(seed).randint(2, (config.max_steps - 1) // two_batches * two_batches)
    services = {run_id: ScriptedServices(redis, run_id, config, seed=seed) for run_id in ("run-straight", "run-killed")}
    # Only the shuffled block of two batches with this step is published, so the run waits there to be killed.
    services["run-killed"].publish_blocks((kill_at - 1) // two_batches + 1)
    for run_id in services:
        await RunStore(redis).create(run_id, config, run_dir=str(tmp_path / run_id))
    playing = [asyncio.create_task(played.play(), name=run_id) for run_id, played in services.items()]

    resumed_at: list[int] = []

    async def be_killed_and_resume() -> None:
        await killed_at(kill_at, services["run-killed"], redis_url, "run-killed", tmp_path)
        names = [path.name for path in (tmp_path / "run-killed" / "checkpoints").glob("step_*")]
        resumed_at.append(int(max(names, default="step_0").removeprefix("step_")))
        # Cold, so that no two ranks that are compared share the order in which they go through sets.
        await to_the_end(redis_url, "run-killed", tmp_path, is_cold=True)

    try:
        await asyncio.gather(to_the_end(redis_url, "run-straight", tmp_path), be_killed_and_resume())
    finally:
        for task in playing:
            task.cancel()

    straight, killed = tmp_path / "run-straight", tmp_path / "run-killed"
    assert trained_groups(killed) == trained_groups(straight), "the same groups in the same steps"
    assert len(set(map(str, trained_groups(straight).values()))) == len(trained_groups(straight))
    losses = [[line["loss"] for line in json_lines(run_dir / "metrics.jsonl")] for run_dir in (straight, killed)]
    assert losses[0] == losses[1]
    found = digests(straight, config.max_steps)
    for part in ("checkpoints/.*/model/.*q_proj", "checkpoints/.*/optimizer/.*exp_avg", "rng/", "^model/"):
        assert any(re.search(part, name) for name in found), f"nothing was compared of {part}"
    assert digests(killed, config.max_steps) == found
    assert newest_ledger(killed) == newest_ledger(straight)
    assert not any("resumed" in message for message in await messages(redis, "run-straight"))
    (told,) = [message for message in await messages(redis, "run-killed") if "resumed" in message]
    assert re.match(rf"the trainer .* resumed at step {resumed_at[0]}(; step.* trained again)?$", told)
