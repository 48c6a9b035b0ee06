"""Which waits of the trainer make admission go deeper: those for groups, not those for stragglers, nor pauses."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.batch_builder import Batch
from services.trainer.intake.intake import Intake
from shared.pause import PausedBy

pytestmark = pytest.mark.unit


@dataclass
class FakeScored:
    """A scored stream with a number of unread entries, which are never judged."""

    num_unread: int = 0
    num_here: int = 0
    is_waited_for: bool = False

    def consider(self) -> None:
        return None

    def numbers(self) -> set[int]:
        return set(range(self.num_here))

    async def receive(self, *, block_s: float | None) -> int:
        found, self.num_unread = self.num_unread, 0
        self.num_here += found
        self.is_waited_for |= block_s is not None and not found
        return found


@dataclass
class FakeBatches:
    batch: Batch = field(default_factory=lambda: Batch(()))
    missing: int = 0

    def num_missing(self, *, num_steps_left: int) -> int:
        return self.missing

    def choose(self, **_: object) -> Batch:
        return self.batch


@dataclass
class FakePause:
    by: PausedBy | None = None


class FakeChanges:
    started: dict[int, int] = {}  # noqa: RUF012  stays empty

    async def read_started(self) -> None: ...


@dataclass
class FakePace:
    num_waits: int = 0
    num_pauses: int = 0
    spare: list[int] = field(default_factory=list[int])

    def note_wait(self, waited_s: float) -> None:
        assert waited_s >= 0
        self.num_waits += 1

    def note_pause(self) -> None:
        self.num_pauses += 1

    def num_ahead(self, *, num_scored: int) -> int:
        return 10 - num_scored

    def note_batch(self, *, num_spare: int) -> None:
        self.spare.append(num_spare)


def intake(scored: FakeScored, batches: FakeBatches, *, paused_by: PausedBy | None = None) -> tuple[Intake, FakePace]:
    pace, nothing = FakePace(), cast(Any, None)
    made = Intake(
        ledger=Ledger(), admission=nothing, pace=cast(Any, pace), scored=cast(Any, scored), considered_to="0-0",
        batches=cast(Any, batches), evaluations=nothing, pause=cast(Any, FakePause(paused_by)),
        changes=cast(Any, FakeChanges()), lost_writes=nothing,
    )  # fmt: skip
    return made, pace


async def test_waiting_for_missing_groups_is_noted() -> None:
    scored = FakeScored()
    waiting, pace = intake(scored, FakeBatches(missing=3))
    await waiting.judge_arrivals(num_steps_left=9)
    assert scored.is_waited_for
    assert (pace.num_waits, pace.num_pauses) == (1, 0)


async def test_reading_groups_that_had_arrived_already_is_not_a_wait() -> None:
    scored = FakeScored(num_unread=5)
    waiting, pace = intake(scored, FakeBatches(missing=3))
    await waiting.judge_arrivals(num_steps_left=9)
    assert not scored.is_waited_for
    assert pace.num_waits == 0


async def test_waiting_for_a_straggler_is_not_noted_because_more_groups_would_not_help() -> None:
    scored = FakeScored()
    waiting, pace = intake(scored, FakeBatches(missing=0))
    await waiting.judge_arrivals(num_steps_left=9)
    assert scored.is_waited_for
    assert pace.num_waits == 0


async def test_a_pause_is_noted() -> None:
    waiting, pace = intake(FakeScored(), FakeBatches(missing=3), paused_by="rewards")
    await waiting.judge_arrivals(num_steps_left=9)
    assert pace.num_pauses == 1


async def test_groups_that_are_scored_and_not_in_the_batch_are_spare_read_or_not() -> None:
    batch = Batch(cast(Any, ("a group", "another")))
    waiting, pace = intake(FakeScored(num_here=3, num_unread=4), FakeBatches(batch))
    assert await waiting.next_batch(policy_version=0, num_steps_left=9) is batch
    assert pace.spare == [5], "3 + 4 - 2"
    assert waiting.num_ahead == 3, "10 - (3 + 4)"
