"""A push that takes long: what the run reports meanwhile, and a process that is asked to end before it has ended."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.trainer.checkpoints.checkpoint import newest_valid
from services.trainer.intake.intake import Intake
from services.trainer.loop import outflow
from services.trainer.loop.outflow import Outflow
from services.trainer.loop.training_loop import Ending, TrainingLoop
from services.trainer.policy.core_results import TokenArray
from services.trainer.policy.policy_core import PolicyCore
from shared.errors import PushError
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Waiting
from tests.eventually import eventually
from tests.trainer.incarnations import create, newest_ledger, small_config, train
from tests.trainer.intake.pause_rig import Watcher
from tests.trainer.played import FakeSender, PlayedServices

LONG_PUSH = Waiting("work", "the push of version 3")
LONG_READING = Waiting("work", "new prompts to be read and admitted")


class HeldPushes:
    """A schedule whose push ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def push_if_needed(self, *_: Any, **__: Any) -> None:
        await self.may_end.wait()

    def waiting(self) -> None:
        return None


async def test_a_push_or_reading_prompts_of_more_than_two_seconds_is_what_the_run_waits_for(
    run_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(outflow, "time", clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    core: Any = SimpleNamespace(num_ranks=1, policy_version=3, named_weights=list)
    pushes: Any = HeldPushes()
    may_be_read = asyncio.Event()

    async def read_prompts() -> None:
        await may_be_read.wait()

    made = Outflow(
        core,
        run_config,
        pushes=pushes,
        saver=cast(Any, None),
        torch_thread=ThreadPoolExecutor(1),
        terminate=asyncio.Event(),
    )
    async with asyncio.TaskGroup() as tasks:
        made.connect(tasks, state=dict, then=read_prompts)
        await made.begin_push_if_needed()
        clock.now_s += 2.0
        assert made.waiting() is None
        clock.now_s += 0.1
        assert made.waiting() == LONG_PUSH
        assert made.awaited_push() is None, "training goes on beside it"
        waiting = tasks.create_task(made.finish_push(), name="the next optimizer step")
        await asyncio.sleep(0)
        assert made.awaited_push() == LONG_PUSH
        pushes.may_end.set()
        await eventually(lambda: made.waiting() is None)
        clock.now_s += 2.1
        assert made.awaited_push() == made.waiting() == LONG_READING
        may_be_read.set()
        await waiting
        assert made.awaited_push() is made.waiting() is None


@dataclass
class Held:
    """A run whose push of one version does not end until the test says so."""

    redis: Redis
    sender: FakeSender
    version: int = 3
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    accumulated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the passes of the next batch are done, and its step waits for the push."""
    terminate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.sender.may_push = self._hold

    def begin(self) -> asyncio.Task[tuple[Ending, TrainingLoop]]:

        def watch(loop: TrainingLoop) -> None:
            core: Any = loop.core
            accumulate, event_loop = core.accumulate, asyncio.get_running_loop()

            def noted(*args: Any, **kwargs: Any) -> Any:
                result = accumulate(*args, **kwargs)
                if core.policy_version == self.version:
                    event_loop.call_soon_threadsafe(self.accumulated.set)
                return result

            core.accumulate = noted

        played = PlayedServices(self.redis)
        training = train(self.redis, played=played, sender=self.sender, terminate=self.terminate, meddle=watch)
        return asyncio.create_task(training, name="run")

    async def _hold(self, version: int) -> None:
        if version == self.version:
            self.begun.set()
            await self.may_end.wait()


def newest_step(directory: Path) -> int | None:
    """Return the step of the newest checkpoint; None if there is no checkpoint."""
    checkpoint = newest_valid(directory / "run" / "checkpoints")
    return None if checkpoint is None else checkpoint.step


@pytest.fixture
async def held(redis: Redis, tmp_path: Path, tiny_model: Path) -> Held:
    await create(redis, small_config(tmp_path, tiny_model), tmp_path)
    return Held(redis, FakeSender(redis))


async def test_the_progress_of_a_run_whose_next_step_waits_for_a_long_push_says_so(
    held: Held, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outflow, "_LONG_PUSH_S", 0.0)
    run = held.begin()
    async with asyncio.timeout(120):
        await held.accumulated.wait()
        progress = (await Watcher(redis).reports(2)).progress
    assert (progress.waiting_kind, progress.waiting_for) == (LONG_PUSH.kind, LONG_PUSH.says)
    held.may_end.set()
    assert (await run)[0] == "finished"


@pytest.mark.parametrize("version", [3, 6])
async def test_a_trainer_that_is_terminated_during_a_push_that_hangs_writes_a_checkpoint_and_ends(
    version: int, held: Held, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is killed, a process has less time than a push. Version 6 is the last."""
    monkeypatch.setattr(outflow, "_LAST_PUSH_S", 0.1)
    held.version = version
    run = held.begin()
    async with asyncio.timeout(120):
        await (held.accumulated if version < 6 else held.begun).wait()
        held.terminate.set()
        assert (await run)[0] == "terminated"
    assert newest_step(tmp_path) == version
    assert held.sender.versions == list(range(version))

    sender = FakeSender(redis)
    assert (await train(redis, played=PlayedServices(redis), sender=sender))[0] == "finished"
    assert sender.versions == list(range(version, 7))
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}


async def test_a_trainer_that_is_terminated_while_a_stopped_run_waits_for_a_push_writes_a_checkpoint_and_ends(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outflow, "_LAST_PUSH_S", 0.1)
    monkeypatch.setattr(Intake, "should_stop", property(lambda _: held.begun.is_set()))
    run = held.begin()
    async with asyncio.timeout(120):
        await held.begun.wait()
        await asyncio.sleep(0.2)
        assert not run.done(), "it waits for the push"
        held.terminate.set()
        assert (await run)[0] == "terminated"
    assert newest_step(tmp_path) == 3


async def test_the_last_checkpoint_of_a_terminated_trainer_has_no_diverged_weights(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = PolicyCore.probe

    def diverged(core: PolicyCore, token_ids: Sequence[int]) -> TokenArray:
        return probe(core, token_ids) * np.float32(math.nan if core.policy_version == 3 else 1.0)

    monkeypatch.setattr(PolicyCore, "probe", diverged)
    run = held.begin()
    async with asyncio.timeout(120):
        await held.accumulated.wait()
        await eventually(lambda: newest_step(tmp_path) == 2)
        held.terminate.set()
        with pytest.raises(BaseExceptionGroup) as raised:
            await run
    assert raised.group_contains(PushError, match="they have diverged")
    assert newest_step(tmp_path) == 2
