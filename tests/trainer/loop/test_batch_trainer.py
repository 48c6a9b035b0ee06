"""One optimizer step beside a push: what counts as its time, and which groups a death is blamed on."""

import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from services.trainer.groups.schedule import RunLength
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.loop import batch_trainer
from services.trainer.loop.batch_trainer import BatchTrainer, TrainedStep
from services.trainer.loop.in_hand import FILE, GroupsInHand
from services.trainer.objective.token_stats import TokenStats
from services.trainer.policy.core_results import AccumulateStats, StepStats
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.run_options.run_config import RunConfig
from tests.groups import scored_group

NUMBERS = [4, 7]


@dataclass
class Clock:
    """Stands in for the module ``time``."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class FakeCore:
    """A core whose passes take 3 seconds and whose step takes 2, and that looks who is in hand meanwhile."""

    policy_version = 5

    def __init__(self, clock: Clock, in_hand: Callable[[], list[int]]) -> None:
        self._clock = clock
        self._in_hand = in_hand
        self.seen: list[list[int]] = []

    def accumulate(self, *_: Any, **__: Any) -> AccumulateStats:
        self.seen.append(self._in_hand())
        self._clock.now_s += 3.0
        return AccumulateStats(TokenStats(), num_rows=4, num_passes=1, num_pass_tokens=20)

    def step(self, _total_steps: int) -> StepStats:
        self.seen.append(self._in_hand())
        self._clock.now_s += 2.0
        return StepStats(policy_version=6, learning_rate=0.1, grad_norm=1.0, token_stats=TokenStats())


def trained_group(number: int) -> TrainedGroup:
    return TrainedGroup(
        waiting=WaitingGroup(number, scored_group(f"{number:08d}"), 0),
        rewards_G=np.array([0.0, 1.0]),
        advantages_G=np.array([-1.0, 1.0]),
        has_signal=True,
    )


@dataclass
class Beside:
    """The step that is made while a push is under way."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.core = FakeCore(self.clock, self.in_hand)
        self.monkeypatch.setattr(batch_trainer, "time", self.clock)

    def in_hand(self) -> list[int]:
        """Return the groups that the next process would blame if this one ended now."""
        groups: list[int] = json.loads((self.directory / FILE).read_text())["groups"]
        return groups

    async def step(self, wait_for_push: Callable[[], Awaitable[bool]]) -> TrainedStep | None:
        with ThreadPoolExecutor(max_workers=1) as torch_thread:
            trainer = BatchTrainer(
                cast(Any, self.core),
                RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], groups_per_step=2),
                length=RunLength(14),
                run_id="run-test",
                run_dir=self.directory,
                in_hand=GroupsInHand(self.directory),
                torch_thread=torch_thread,
                wait_for_push=wait_for_push,
            )
            (planned,) = await trainer.plan(list(map(trained_group, NUMBERS)), num_steps_left=9)
            return await trainer.step(planned)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beside:
    return Beside(tmp_path, monkeypatch)


async def test_the_time_of_a_step_leaves_out_the_wait_for_the_push(beside: Beside) -> None:
    async def push_for_a_while() -> bool:
        beside.clock.now_s += 100.0
        return True

    trained = await beside.step(push_for_a_while)
    assert trained is not None
    assert trained.train_s == pytest.approx(3.0 + 2.0)


async def test_a_death_during_the_wait_for_the_push_is_blamed_on_no_group(beside: Beside) -> None:
    found: list[list[int]] = []

    async def look() -> bool:
        found.append(beside.in_hand())
        return True

    await beside.step(look)
    assert found == [[]]
    assert beside.core.seen == [NUMBERS, NUMBERS], "in the passes and in the optimizer step"
    assert beside.in_hand() == []


async def test_no_step_is_made_if_the_process_is_to_end_before_the_push(beside: Beside) -> None:
    async def end() -> bool:
        return False

    assert await beside.step(end) is None
    assert beside.core.seen == [NUMBERS], "only the passes were made"
    assert beside.in_hand() == []
