"""Real runs log exactly the metrics of the catalogue, and the log has per-token arrays from the real core."""

import asyncio
import json
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.fence import take_over
from services.trainer.loop.assembly import assemble
from services.trainer.loop.reporting import memory_metrics
from services.trainer.run_context import RunContext
from services.trainer.telemetry.metric_catalogue import METRICS, find_metric
from shared.messages import ScoredGroup
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.tiny_model import make_tiny_moe
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices, as_agents

OF_EVERY_STEP = {metric.name for metric in METRICS if not metric.when} - {"rewards/{reward}/mean"}


async def train(
    redis: Redis,
    tiny_model: Path,
    tmp_path: Path,
    *,
    change: Callable[[ScoredGroup], ScoredGroup] | None = None,
    **options: Any,
) -> Path:
    """Return the directory of a finished run with two groups per step."""
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{number % 7}="}) + "\n" for number in range(20)))
    plain: dict[str, Any] = {"max_steps": 2, "groups_per_step": 2, "num_generations": 4, "max_completion_length": 8}
    config = RunConfig(
        model=str(tiny_model), dataset_name=str(rows), reward_funcs=["parity"], save_steps=1, **(plain | options)
    )
    await redis.flushdb()
    await RunStore(redis).create(RUN_ID, config, run_dir=str(tmp_path / "run"))
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    played = PlayedServices(redis)
    played.bury = {"00000001"}
    played.spoil = {} if change is None else {f"{number:08d}": change for number in range(20)}
    incarnation = await take_over(redis, RunKeys(RUN_ID))
    run = RunContext(redis, RunStore(redis), record, incarnation)
    loop = await assemble(run, FakeSender(redis), terminate=asyncio.Event())
    outflow: Any = loop.outflow
    save = outflow.save

    async def save_to_the_end() -> None:
        await save()
        await loop.outflow.saver.finish()  # else the next step may be logged before this checkpoint is on disk

    outflow.save = save_to_the_end
    services = asyncio.create_task(played.play(), name="played services")
    try:
        async with asyncio.timeout(120):
            assert await loop.run() == "finished"
    finally:
        services.cancel()
        await asyncio.to_thread(loop.reporting.close, run_is_over=True, timeout_s=60.0)
    return tmp_path / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_runs_log_what_the_catalogue_lists_and_nothing_else(
    redis: Redis, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "b1="}\n{"prompt": "b2="}\n')
    evaluated = {"eval_dataset_name": str(tmp_path / "test.jsonl"), "eval_steps": 1}
    runs: dict[str, dict[str, Any]] = {
        "dapo": {"beta": 0.1, "entropy_coef": 0.01, "report_to": ["tensorboard"], **evaluated},
        "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
        "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
        "experts": {},
        "agents": {"change": as_agents},
    }
    found: set[str] = set()
    for name, options in runs.items():
        (tmp_path / name).mkdir()
        model = make_tiny_moe(tmp_path / "moe") if name == "experts" else tiny_model
        run_dir = await train(redis, model, tmp_path / name, **options)
        for line in lines(run_dir / "metrics.jsonl"):
            names = {metric[0].name if (metric := find_metric(logged)) else f"not listed: {logged}" for logged in line}
            assert names >= OF_EVERY_STEP, f"{name} leaves out {OF_EVERY_STEP - names}"
            assert 0 <= line["wait_time"] <= line["step_time"]
            assert min(line["queue/scored"], line["queue/settled"], line["queue/ahead"]) >= 0
            found |= names
        if "eval_steps" in options:
            (evaluation, *_) = lines(run_dir / "evaluations.jsonl")
            found |= {metric[0].name if (metric := find_metric(logged)) else logged for logged in evaluation}
    assert found == {metric.name for metric in METRICS if metric.when != "a GPU"}


async def test_rollouts_carry_per_token_arrays_of_the_core_if_asked(
    redis: Redis, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = await train(redis, tiny_model, tmp_path, log_per_token_share=1.0, log_completions=True)
    rows = [row for path in sorted((run_dir / "rollouts").iterdir()) for row in lines(path)]
    assert len(rows) == 16
    for row in rows:
        arrays = row["per_token"]
        assert {name: len(values) for name, values in arrays.items()} == dict.fromkeys(
            ("token_ids", "generator_logprobs", "trainer_logprobs", "importance_ratio", "entropy", "advantage"), 2
        )
        assert arrays["token_ids"] == [5 + row["branch"], 2]
        assert arrays["generator_logprobs"] == [-4.0, -4.0]
        assert arrays["advantage"] == pytest.approx([row["advantage"]] * 2, rel=1e-4)
        for logprob, ratio, entropy in zip(
            arrays["trainer_logprobs"], arrays["importance_ratio"], arrays["entropy"], strict=True
        ):
            assert ratio == pytest.approx(math.exp(logprob + 4.0), rel=1e-3)
            assert 0 < entropy < math.log(64)
    assert "Step 1" in capfd.readouterr().err


async def test_the_arrays_of_a_rollout_are_those_of_all_its_rows(
    redis: Redis, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = await train(redis, tiny_model, tmp_path, change=as_agents, log_per_token_share=1.0, log_completions=True)
    logged = [row for path in sorted((run_dir / "rollouts").iterdir()) for row in lines(path)]
    lost, played = [row for row in logged if "lost" in row], [row for row in logged if "lost" not in row]
    assert [(row["branch"], row["lost"], row["reward"]) for row in lost] == [(0, "a tool hung", None)] * 4
    assert len(played) == 12
    for row in played:
        assert {name: len(values) for name, values in row["per_token"].items()} == dict.fromkeys(row["per_token"], 5)
        assert row["per_token"]["token_ids"] == [5 + row["branch"], 2, 7, 8, 2]
        assert [of_row["num_tokens"] for of_row in row["rows"]] == [2, 3]
        assert row["num_tokens"] == 5
    assert "TOOL" in capfd.readouterr().err


async def test_a_share_of_the_rollouts_carries_arrays_and_none_unless_asked(
    redis: Redis, tiny_model: Path, tmp_path: Path
) -> None:
    counts: dict[float, int] = {}
    for share in (0.0, 0.4):
        (tmp_path / str(share)).mkdir()
        run_dir = await train(redis, tiny_model, tmp_path / str(share), log_per_token_share=share)
        rows = [row for path in (run_dir / "rollouts").iterdir() for row in lines(path)]
        counts[share] = sum("per_token" in row for row in rows)
    assert counts[0.0] == 0
    assert 0 < counts[0.4] < 16


def test_memory_is_in_bytes_and_its_peak_stays() -> None:
    device, num_bytes = torch.device("cpu"), 64 * 1024 * 1024
    grown: list[float] = []
    during: dict[str, float] = {}
    while len(grown) < 5 and not any(grew > 0.9 * num_bytes for grew in grown):
        # Where memory is short, the kernel may take other pages of this process meanwhile.
        before = memory_metrics(device)
        # An array would take pages that earlier tests have freed and the allocator has kept.
        with mmap.mmap(-1, num_bytes) as held:
            held.write(bytes(num_bytes))
            during = memory_metrics(device)
        grown.append(during["memory/rss_bytes"] - before["memory/rss_bytes"])
    assert max(grown) > 0.9 * num_bytes
    after = memory_metrics(device)
    assert after["memory/peak_rss_bytes"] >= during["memory/peak_rss_bytes"] > 0.9 * during["memory/rss_bytes"]
    assert after.keys() == {"memory/rss_bytes", "memory/peak_rss_bytes"}
