"""The prompt that generators score after a push."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.data.streamed_dataset import StreamedDataset, StreamedRow
from services.trainer.fence import take_over
from services.trainer.loop.assembly import assemble
from services.trainer.loop.push_schedule import make_prober
from services.trainer.push.prober import Prober
from services.trainer.run_context import RunContext
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.incarnations import create, small_config
from tests.trainer.played import RUN_ID, FakeSender

THREAD = ThreadPoolExecutor(max_workers=1)


def prober_of(prompts: list[list[int]], **options: Any) -> Prober | None:
    """Return the prober for a data set whose prompts are token ids."""
    config = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], **options)

    def probe(token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def row_at(number: int) -> SimpleNamespace:
        return SimpleNamespace(problem=None, prompt=prompts[number])

    core: Any = SimpleNamespace(probe=probe)
    encoder: Any = SimpleNamespace(encode=list)
    rows: Any = SimpleNamespace(row_at=row_at)
    return make_prober(config, core, encoder, rows, torch_thread=THREAD)


async def test_the_probe_is_the_beginning_of_the_data_set() -> None:
    prober = prober_of([[5] * 20, [6] * 20])
    assert prober is not None
    assert (await prober.probe(0, timeout_s=1.0)).token_ids == [5] * 20 + [6] * 12


def test_a_prompt_of_one_token_has_no_logprob_to_compare() -> None:
    assert prober_of([[5], *([[]] * 63)]) is None


def test_a_run_may_ask_for_no_probe() -> None:
    assert prober_of([[5] * 32], push_probe_tolerance=None) is None


async def test_a_streamed_data_set_is_read_beside_the_event_loop(
    redis: Redis, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may come from a network, and a read is tried again for more than a minute."""
    await create(redis, small_config(tmp_path, tiny_model, dataset_streaming=True), tmp_path)
    threads: list[threading.Thread] = []
    read_row = StreamedDataset.row_at

    def row_at(self: StreamedDataset, admission_number: int) -> StreamedRow:
        threads.append(threading.current_thread())
        return read_row(self, admission_number)

    monkeypatch.setattr(StreamedDataset, "row_at", row_at)
    store = RunStore(redis)
    record = await store.get(RUN_ID)
    assert record is not None
    run = RunContext(redis, store, record, await take_over(redis, RunKeys(RUN_ID)))
    await assemble(run, FakeSender(redis), terminate=asyncio.Event())
    assert threads, "the probe is the beginning of the data set"
    assert threading.main_thread() not in threads
