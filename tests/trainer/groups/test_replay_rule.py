"""After a crash, no group is too stale, whatever the seed: a simulation of the rule that keeps prompts back."""

import random
from dataclasses import dataclass, field

import pytest

from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import is_too_stale, stragglers, window

pytestmark = pytest.mark.unit

STEPS = 60


@dataclass
class World:
    """A trainer, a generator and a crash of both. Groups are numbers, each with the version that sampled it."""

    random: random.Random
    per_step: int
    max_staleness: int
    save_steps: int
    version: int = 0
    admitted: int = 0
    waiting: set[int] = field(default_factory=set[int])
    """Groups on the prompts stream."""
    begun: dict[int, int] = field(default_factory=dict[int, int])
    sampled: dict[int, int] = field(default_factory=dict[int, int])
    """Groups on the scored stream, until a checkpoint contains them: number -> version."""
    trained: set[int] = field(default_factory=set[int])
    held_back: list[int] = field(default_factory=list[int])
    saved: tuple[int, int, frozenset[int]] = (0, 0, frozenset())
    stale: set[int] = field(default_factory=set[int])

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.per_step)

    def num_in_flight(self) -> int:
        return self.admitted - len(self.trained) - len(self.held_back)

    def admit(self) -> None:
        limit = window(num_steps_left=STEPS - self.version, max_staleness=self.max_staleness, shape=self.shape)
        for _ in range(limit - self.num_in_flight()):
            if self.held_back:
                self.waiting.add(self.held_back.pop(0))
            else:
                self.waiting.add(self.admitted)
                self.admitted += 1

    def generate(self) -> None:
        for number in sorted(self.waiting)[: self.random.randint(0, self.per_step)]:
            self.waiting.remove(number)
            self.begun[number] = self.version
        for number in [it for it in sorted(self.begun) if self.random.random() < 0.4]:
            self.sampled[number] = self.begun.pop(number)

    def train(self) -> None:
        here = {number: version for number, version in self.sampled.items() if number not in self.trained}
        for number, version in here.items():
            if is_too_stale(
                oldest_policy_version=version,
                policy_version=self.version,
                max_staleness=self.max_staleness,
                shape=self.shape,
            ):
                self.stale.add(number)
        order = sorted(here, key=lambda number: (here[number], number))
        batch, rest = order[: self.per_step], order[self.per_step :]
        if len(batch) < self.per_step or stragglers(
            left_out={number: here[number] for number in rest},
            unfinished=self.begun,
            policy_version=self.version,
            max_staleness=self.max_staleness,
            shape=self.shape,
        ):
            return
        self.trained |= set(batch)
        self.version += 1
        self.admit()
        if self.version % self.save_steps == 0:
            self.saved = (self.version, self.admitted, frozenset(self.trained))
            self.sampled = {number: version for number, version in self.sampled.items() if number not in self.trained}

    def crash(self, *, keeps_back: bool) -> None:
        """Kill both: unfinished groups are on the prompts stream again, later trained ones on the scored stream."""
        self.waiting |= set(self.begun)
        self.begun = {}
        version, admitted, trained = self.saved
        self.version, self.trained = version, set(trained)
        if keeps_back:
            self.held_back = sorted({*self.held_back, *(it for it in self.waiting if it >= admitted)})
            self.waiting -= set(self.held_back)


def play(seed: int, *, keeps_back: bool) -> World:
    chance = random.Random(seed)
    world = World(
        chance, per_step=chance.randint(1, 4), max_staleness=chance.randint(0, 3), save_steps=chance.randint(1, 12)
    )
    world.admit()
    num_crashes = 0
    for _ in range(10_000):
        if world.version >= STEPS or world.stale:
            break
        world.generate()
        world.train()
        if world.version < STEPS and num_crashes < 5 and chance.random() < 0.02:
            world.crash(keeps_back=keeps_back)
            num_crashes += 1
        world.admit()
    return world


@pytest.mark.parametrize("seed", range(60))
def test_no_group_is_too_stale_after_crashes_and_every_step_is_made(seed: int) -> None:
    world = play(seed, keeps_back=True)
    assert world.stale == set()
    assert world.version == STEPS
    assert len(world.trained) == STEPS * world.per_step


def test_without_keeping_prompts_back_a_crash_costs_groups() -> None:
    assert any(play(seed, keeps_back=False).stale for seed in range(60))
