"""A run with the real trainer process ends early, and its model is that of the best evaluation, whatever kills it."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.checkpoints.manifest import find_damage
from services.trainer.checkpoints.shards import read_shards, saved_shapes
from services.trainer.ranks.exit_status import ENDED, REFUSED
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import BestEvaluation, RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.incarnations import create, json_lines, rank_process, small_config
from tests.trainer.played import RUN_ID, PlayedServices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REWARD_AT = {2: 0.25, 4: 0.75, 6: 0.75, 8: 0.5}
"""Reward of every completion in the evaluation of a step: the second is the best, and the third only as good."""
EARLY = "stopped early: eval_reward did not improve in the last 2 evaluations; the best is 0.75 at step 4"


def reward(label: str, branch: int) -> float:
    """Return the reward of a training completion by its branch, and of an evaluation's by its step."""
    if not label.startswith("eval-"):
        return float(branch % 2)
    return REWARD_AT[int(label.split("-")[2])]


def stopping_config(directory: Path, model: Path, **settings: Any) -> RunConfig:
    """Return the config of a run that would make 40 steps, and keeps one checkpoint besides the best."""
    prompts = directory / "eval.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} ="}) + "\n" for number in range(3)))
    plain: dict[str, Any] = {
        "max_steps": 40,
        "eval_dataset_name": str(prompts),
        "eval_steps": 2,
        "save_steps": 3,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
    }
    return small_config(directory, model, **plain | settings)


async def to_the_end(redis_url: str, directory: Path, *, killed: tuple[str, ...] = ()) -> int:
    """Run trainers of the run until one is not killed, and return its exit status. Each moment kills one."""
    for moment in killed:
        async with rank_process(redis_url, RUN_ID, directory, module="tests.trainer.killed_rank", KILLED=moment) as it:
            assert await it.wait() == -signal.SIGKILL, log_of(directory)
    async with rank_process(redis_url, RUN_ID, directory) as process:
        return await process.wait()


def log_of(directory: Path) -> str:
    return (directory / f"{RUN_ID}.log").read_text()


async def record(redis: Redis) -> RunRecord:
    found = await RunStore(redis).get(RUN_ID)
    assert found is not None
    return found


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(shape) for name, shape in saved_shapes(checkpoint / "model").items()}
    read_shards(checkpoint / "model", tensors)
    return tensors


def assert_model_is_of(checkpoint: Path, model: Path) -> None:
    saved = weights_in(checkpoint)
    exported = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for name, tensor in saved.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(
    "killed",
    [(), ("judged 4", "judged 6", "judged 8", "exporting")],
    ids=["undisturbed", "killed after each evaluation and before its end"],
)
async def test_a_run_without_improvement_ends_early_and_its_model_is_the_best_checkpoint_bit_by_bit(
    killed: tuple[str, ...], redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    await create(redis, stopping_config(tmp_path, tiny_model), tmp_path)
    playing = asyncio.create_task(PlayedServices(redis, reward=reward).play(), name="played services")
    try:
        async with asyncio.timeout(800):
            assert await to_the_end(redis_url, tmp_path, killed=killed) == ENDED, log_of(tmp_path)
    finally:
        playing.cancel()
    run_dir, found = tmp_path / "run", await record(redis)
    assert (found.status, found.reason) == ("finished", EARLY)
    assert found.progress.best == BestEvaluation(4, "eval_reward", 0.75, num_without_improvement=2)
    assert (found.progress.step, found.progress.model_step) == (8, 4)
    evaluations = json_lines(run_dir / "evaluations.jsonl")
    assert {line["step"]: line["eval_reward"] for line in evaluations} == REWARD_AT
    for line in evaluations:
        assert line["eval_policy_version/min"] == line["eval_policy_version/max"] == line["step"], "exactly its weights"
    best, last = run_dir / "checkpoints" / "step_00000004", run_dir / "checkpoints" / "step_00000008"
    assert sorted((run_dir / "checkpoints").glob("step_*")) == [best, last]
    assert find_damage(best) is None
    assert_model_is_of(best, run_dir / "model")
    assert not all(torch.equal(tensor, weights_in(last)[name]) for name, tensor in weights_in(best).items())
    assert "optimizer step 4 of" in (run_dir / "model" / "README.md").read_text()
    ledger = json.loads((last / "trainer_state.json").read_text())["extra"]["ledger"]
    assert set(ledger["dropped"]) <= {"run_ended"}, "groups in flight are accounted for"
    events: Any = await redis.xrange(RunKeys(RUN_ID).events)
    told = [json.loads(fields[b"data"]) for _, fields in events if fields[b"kind"] in (b"log", b"status")]
    assert {"message": EARLY} in told
    assert {"status": "finished", "reason": EARLY} in told


async def test_a_metric_that_no_evaluation_has_fails_the_run_with_the_names_there_are(
    redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = stopping_config(tmp_path, tiny_model, metric_for_best_model="rewards/party/mean")
    await create(redis, config, tmp_path)
    playing = asyncio.create_task(PlayedServices(redis, reward=reward).play(), name="played services")
    try:
        async with asyncio.timeout(400):
            assert await to_the_end(redis_url, tmp_path) == REFUSED, log_of(tmp_path)
    finally:
        playing.cancel()
    found = await record(redis)
    assert found.status == "failed"
    assert "metric_for_best_model names eval_rewards/party/mean" in found.reason
    assert "eval_rewards/parity/mean" in found.reason
    assert "Traceback" not in log_of(tmp_path)
