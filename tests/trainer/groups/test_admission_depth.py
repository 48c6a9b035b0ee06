"""Sampling runs ahead of training as far as keeps the trainer from waiting, and no further."""

from dataclasses import dataclass, field

import pytest

from services.trainer.groups.admission_depth import AdmissionDepth
from services.trainer.groups.schedule import BatchShape

pytestmark = pytest.mark.unit


def depth(*, groups_per_step: int = 8, max_staleness: int = 4, is_eager: bool = False) -> AdmissionDepth:
    return AdmissionDepth(shape=BatchShape(groups_per_step), max_staleness=max_staleness, is_eager=is_eager)


def test_one_batch_is_sampled_while_another_is_trained() -> None:
    assert depth().max_unsettled(num_steps_left=100) == 16


def test_an_eager_run_fills_the_window_from_the_first_step() -> None:
    eager = depth(is_eager=True)
    for _ in range(100):
        eager.note_batch(waited_share=0.0, num_spare=32)
    assert eager.max_unsettled(num_steps_left=100) == 40


def test_each_wait_adds_half_a_batch_up_to_the_window() -> None:
    run, seen = depth(), []
    for _ in range(8):
        run.note_batch(waited_share=0.5, num_spare=0)
        seen.append(run.max_unsettled(num_steps_left=100))
    assert seen == [20, 24, 28, 32, 36, 40, 40, 40]


def test_a_wait_that_may_be_noise_adds_nothing() -> None:
    run = depth()
    run.note_batch(waited_share=0.02, num_spare=0)
    assert run.max_unsettled(num_steps_left=100) == 16


def test_half_of_what_was_never_needed_goes_after_eight_batches() -> None:
    run = depth()
    for _ in range(6):
        run.note_batch(waited_share=1.0, num_spare=0)
    for num_spare in (30, 25, 24, 30, 30, 30, 30):
        run.note_batch(waited_share=0.0, num_spare=num_spare)
    assert run.max_unsettled(num_steps_left=100) == 40, "seven batches are not enough"
    run.note_batch(waited_share=0.0, num_spare=30)
    assert run.max_unsettled(num_steps_left=100) == 28, "40 - 24 / 2"


def test_groups_that_were_needed_once_in_eight_batches_stay() -> None:
    run = depth()
    for _ in range(6):
        run.note_batch(waited_share=1.0, num_spare=0)
    for num_spare in (30, 30, 30, 0, 30, 30, 30, 30):
        run.note_batch(waited_share=0.0, num_spare=num_spare)
    assert run.max_unsettled(num_steps_left=100) == 40


def test_a_wait_begins_the_count_of_batches_anew() -> None:
    run = depth()
    for _ in range(7):
        run.note_batch(waited_share=0.0, num_spare=8)
    run.note_batch(waited_share=0.5, num_spare=8)
    for _ in range(7):
        run.note_batch(waited_share=0.0, num_spare=8)
    assert run.max_unsettled(num_steps_left=100) == 20


def test_never_less_than_one_batch_ahead() -> None:
    run = depth()
    for _ in range(80):
        run.note_batch(waited_share=0.0, num_spare=100)
    assert run.max_unsettled(num_steps_left=100) == 16


def test_without_room_for_a_second_batch_trainer_and_generators_take_turns() -> None:
    for shape, max_staleness in ((BatchShape(8), 0), (BatchShape(8, 2, 1), 2)):
        run = AdmissionDepth(shape=shape, max_staleness=max_staleness, is_eager=False)
        run.note_batch(waited_share=1.0, num_spare=0)
        assert run.max_unsettled(num_steps_left=100) == shape.groups(num_steps=shape.steps)


def test_no_more_than_the_last_steps_use() -> None:
    assert depth().max_unsettled(num_steps_left=1) == 8


@dataclass
class Pipeline:
    """A trainer and a generator that finishes one group every ``group_s`` seconds, oldest first."""

    run: AdmissionDepth
    group_s: float
    step_s: float = 1.0
    batch: int = 8
    now: float = 0.0
    generator_free_at: float = 0.0
    version: int = 0
    groups: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When each group under way is finished, and the version that began it."""

    def admit(self) -> None:
        while len(self.groups) < self.run.max_unsettled(num_steps_left=10**6):
            self.generator_free_at = max(self.generator_free_at, self.now) + self.group_s
            self.groups.append((self.generator_free_at, self.version))

    def step(self) -> list[int]:
        """Make one step, and return the staleness of its groups."""
        self.admit()
        ready_at = self.groups[self.batch - 1][0]
        waited_s, self.now = max(0.0, ready_at - self.now), max(self.now, ready_at)
        num_spare = sum(done_at <= self.now for done_at, _ in self.groups) - self.batch
        self.run.note_batch(waited_share=waited_s / (waited_s + self.step_s), num_spare=num_spare)
        stale = [self.version - version for _, version in self.groups[: self.batch]]
        self.now += self.step_s
        self.version += 1
        del self.groups[: self.batch]
        return stale


@pytest.mark.parametrize("max_staleness", [2, 4])
def test_groups_of_a_generator_twice_as_fast_as_needed_are_one_step_old(max_staleness: int) -> None:
    pipeline = Pipeline(depth(max_staleness=max_staleness), group_s=1 / 16)
    began = [pipeline.step() for _ in range(40)]
    assert max(map(max, began)) <= max_staleness
    began_at, steps = pipeline.now, [pipeline.step() for _ in range(100)]
    assert sum(map(sum, steps)) / 800 <= 1.0
    assert pipeline.now - began_at == pytest.approx(100.0), "and the trainer never waits"


def test_a_run_that_was_deep_while_its_generator_was_slow_becomes_shallow_again() -> None:
    pipeline = Pipeline(depth(), group_s=1 / 4)
    for _ in range(20):
        pipeline.step()
    assert pipeline.run.max_unsettled(num_steps_left=100) == 40
    pipeline.group_s = 1 / 32
    for _ in range(100):
        pipeline.step()
    assert pipeline.run.max_unsettled(num_steps_left=100) <= 18


def test_a_generator_that_is_the_slower_part_has_the_whole_window() -> None:
    pipeline = Pipeline(depth(), group_s=1 / 4)
    for _ in range(20):
        pipeline.step()
    assert pipeline.run.max_unsettled(num_steps_left=100) == 40
