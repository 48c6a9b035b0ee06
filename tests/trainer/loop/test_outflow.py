"""What a run reports while a push takes long."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.trainer.loop import outflow
from services.trainer.loop.outflow import Outflow
from services.trainer.loop.training_loop import TrainingLoop
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Waiting
from tests.trainer.incarnations import create, small_config, train
from tests.trainer.intake.pause_rig import Watcher
from tests.trainer.played import FakeSender, PlayedServices

LONG_PUSH = Waiting("work", "the push of version 3")


class HeldPushes:
    """A schedule whose push ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def push_if_needed(self, *_: Any, **__: Any) -> None:
        await self.may_end.wait()

    def waiting(self) -> None:
        return None


async def nothing() -> None: ...


async def test_a_push_of_more_than_two_seconds_is_what_the_run_waits_for(
    run_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(outflow, "time", clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    core: Any = SimpleNamespace(num_ranks=1, policy_version=3, named_weights=list)
    pushes: Any = HeldPushes()
    made = Outflow(core, run_config, pushes=pushes, saver=cast(Any, None), torch_thread=ThreadPoolExecutor(1))
    async with asyncio.TaskGroup() as tasks:
        await made.begin_push_if_needed(tasks, then=nothing)
        clock.now_s += 2.0
        assert made.waiting() is None
        clock.now_s += 0.1
        assert made.waiting() == LONG_PUSH
        assert made.awaited_push() is None, "training goes on beside it"
        waiting = tasks.create_task(made.finish_push(), name="the next optimizer step")
        await asyncio.sleep(0)
        assert made.awaited_push() == LONG_PUSH
        pushes.may_end.set()
        await waiting
        assert made.awaited_push() is made.waiting() is None


async def test_the_progress_of_a_run_whose_next_step_waits_for_a_long_push_says_so(
    redis: Redis, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outflow, "_LONG_PUSH_S", 0.0)
    await create(redis, small_config(tmp_path, tiny_model), tmp_path)
    sender, may_end, accumulated = FakeSender(redis), asyncio.Event(), asyncio.Event()

    async def hold_version_3(version: int) -> None:
        if version == 3:
            await may_end.wait()

    def watch(loop: TrainingLoop) -> None:
        core: Any = loop.core
        accumulate, event_loop = core.accumulate, asyncio.get_running_loop()

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = accumulate(*args, **kwargs)
            if core.policy_version == 3:
                event_loop.call_soon_threadsafe(accumulated.set)
            return result

        core.accumulate = noted

    sender.may_push = hold_version_3
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender, meddle=watch), name="run")
    async with asyncio.timeout(120):
        await accumulated.wait()
        progress = (await Watcher(redis).reports(2)).progress
    assert (progress.waiting_kind, progress.waiting_for) == (LONG_PUSH.kind, LONG_PUSH.says)
    may_end.set()
    assert (await run)[0] == "finished"
