"""The training rank as a process: its exit status, and the run's record after its end."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.policy.policy_model import load_policy
from services.trainer.ranks.exit_status import CRASHED, FENCED, REFUSED
from shared.errors import UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.tiny_model import make_tiny_model
from tests.trainer.incarnations import rank_process

RUN_ID = "run-test"
WITHIN_S = 200
pytestmark = pytest.mark.timeout(600)


StartRank = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[StartRank]:
    """Return a function that starts rank processes. Processes that still run at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        redis_url: str, *arguments: str, module: str = "services.trainer.rank", **variables: str
    ) -> "subprocess.Popen[str]":
        environment = {**os.environ, "HEADRACE_REDIS_URL": redis_url, "HEADRACE_RUNS_DIR": str(tmp_path), **variables}
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=Path(__file__).parents[2],
            env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    return RunConfig(
        model=str(make_tiny_model(tmp_path / "model")), dataset_name=str(rows), reward_funcs=["f:g"], max_steps=2
    )


async def record(redis: Redis) -> RunRecord:
    found = await RunStore(redis).get(RUN_ID)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("lost", "reason"), [("train.jsonl", "train.jsonl"), ("model/config.json", "model"), ("model", "model")]
)
async def test_a_file_that_vanished_after_submit_fails_the_run_with_a_sentence(
    lost: str, reason: str, redis: Redis, redis_url: str, config: RunConfig, tmp_path: Path
) -> None:
    await RunStore(redis).create(RUN_ID, config, run_dir=str(tmp_path / "run"))
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    async with rank_process(redis_url, RUN_ID, tmp_path) as rank, asyncio.timeout(WITHIN_S):
        status = await rank.wait()
    output = (tmp_path / f"{RUN_ID}.log").read_text()
    assert status == REFUSED, output
    found = await record(redis)
    assert found.status == "failed"
    assert reason in found.reason
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "x"}'),
        ("model.safetensors", "garbage"),
    ],
)
def test_a_damaged_model_is_refused_in_words(file: str, content: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / file).write_text(content)

    def load() -> None:
        load_tokenizer(str(model))
        load_policy(str(model), revision=None, device=torch.device("cpu"))

    with pytest.raises(UserError, match=str(model)):
        load()


async def test_a_run_that_is_not_there_is_refused(redis: Redis, redis_url: str, start_rank: StartRank) -> None:
    assert await redis.ping()
    rank = start_rank(redis_url, "run-nowhere")
    output, _ = rank.communicate(timeout=WITHIN_S)
    assert rank.returncode == REFUSED
    assert "there is no run run-nowhere in Redis" in output


def test_without_a_run_id_it_prints_its_usage(start_rank: StartRank) -> None:
    rank = start_rank("redis://127.0.0.1:1/0")
    output, _ = rank.communicate(timeout=WITHIN_S)
    assert rank.returncode == REFUSED
    assert output == "usage: python -m services.trainer.rank RUN_ID\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [("UnavailableError", CRASHED), ("RuntimeError", CRASHED), ("StateLostError", REFUSED), ("FencedError", FENCED)],
)
def test_a_rank_whose_torch_thread_is_stuck_ends_with_the_status_of_its_error_and_says_it(
    error: str, status: int, start_rank: StartRank
) -> None:
    rank = start_rank("redis://127.0.0.1:1/0", RUN_ID, module="tests.trainer.stuck_rank", ENDS_WITH=error)
    output, _ = rank.communicate(timeout=WITHIN_S)
    assert rank.returncode == status, output
    assert "this is the end" in output


async def test_a_rank_that_was_superseded_ends_and_does_not_touch_the_record(
    redis: Redis, redis_url: str, config: RunConfig, tmp_path: Path, start_rank: StartRank
) -> None:
    await RunStore(redis).create(RUN_ID, config, run_dir=str(tmp_path / "run"))
    rank = start_rank(redis_url, RUN_ID)
    keys = RunKeys(RUN_ID)
    said: set[str] = set()

    async def trains() -> bool:
        said.add((await record(redis)).progress.starting)
        return bool(await redis.xlen(keys.prompts))

    # The rank has admitted its first groups and waits for a generator. Its successor finds the first of them done.
    await eventually(trains, within_s=WITHIN_S)
    assert {"starting", "loading the model"} <= said
    assert (await record(redis)).progress.starting == "", "it trains"
    await redis.incr(keys.epoch)
    await redis.xadd(keys.dead, {"stream": keys.prompts, "group_id": "00000000", "reason": "test", "payload": b""})
    output, _ = rank.communicate(timeout=WITHIN_S)
    assert rank.returncode == FENCED, output
    assert "was superseded by 2" in output
    assert (await record(redis)).status == "queued"
