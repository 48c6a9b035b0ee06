"""The in-flight window with a toy engine: it fills the KV cache, and rarely overfills it."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generator.inflight_window import AIM, HIGH, EngineLoad, InflightWindow, first_size

pytestmark = pytest.mark.unit

NUM_GENERATIONS = 4


@dataclass
class Sequence:
    group: int
    length: int
    num_tokens: int = 0


@dataclass
class ToyEngine:
    """Adds a token to each running sequence per step; preempts the youngest one when the cache is full."""

    capacity: int
    max_num_seqs: int = 10_000
    running: list[Sequence] = field(default_factory=list[Sequence])
    waiting: deque[Sequence] = field(default_factory=deque[Sequence])
    num_preempted: int = 0
    peak: float = 0.0
    num_tokens_sampled: int = 0

    def used(self) -> int:
        return sum(sequence.num_tokens for sequence in self.running)

    def step(self) -> list[Sequence]:
        """Return the finished sequences."""
        while (
            self.waiting
            and len(self.running) < self.max_num_seqs
            and self.used() + self.waiting[0].num_tokens + len(self.running) + 1 <= self.capacity
        ):
            self.running.append(self.waiting.popleft())
        while self.used() + len(self.running) > self.capacity:
            self.num_preempted += 1
            self.waiting.appendleft(self.running.pop())
        for sequence in self.running:
            sequence.num_tokens += 1
        self.num_tokens_sampled += len(self.running)
        self.peak = max(self.peak, self.used() / self.capacity)
        ended = [sequence for sequence in self.running if sequence.num_tokens >= sequence.length]
        self.running = [sequence for sequence in self.running if sequence.num_tokens < sequence.length]
        return ended

    def take_load(self) -> EngineLoad:
        load = EngineLoad(self.peak, len(self.running), len(self.waiting), self.num_preempted)
        self.peak, self.num_preempted = self.used() / self.capacity, 0
        return load


@dataclass
class Served:
    sizes: list[int]
    usages: list[float]
    num_preempted: int
    num_tokens: int
    fewest_idle_groups: float


def serve(
    engine: ToyEngine, window: InflightWindow, length: Callable[[int], int], *, num_steps: int, settled_after: int = 0
) -> Served:
    """Serve groups without end, one sequence length after the other; return the observations of the steady state."""
    left: dict[int, int] = {}
    next_group = 0
    served = Served([], [], 0, 0, float("inf"))
    for step in range(num_steps):
        load = engine.take_load()
        window.observe(load, num_inflight=len(left))
        while len(left) < window.size:
            left[next_group] = NUM_GENERATIONS
            engine.waiting.extend(Sequence(next_group, max(1, length(next_group))) for _ in range(NUM_GENERATIONS))
            next_group += 1
        for sequence in engine.step():
            left[sequence.group] -= 1
            if left[sequence.group] == 0:
                window.observe(engine.take_load(), num_inflight=len(left))
                del left[sequence.group]
                window.group_finished()
        if step >= settled_after:
            served.sizes.append(window.size)
            served.usages.append(engine.used() / engine.capacity)
            served.num_preempted += load.num_preempted
            served.num_tokens += len(engine.running)
            served.fewest_idle_groups = min(served.fewest_idle_groups, len(engine.waiting) / NUM_GENERATIONS)
    return served


def long_tailed(rng: random.Random, *, mean: float, most: int) -> Callable[[int], int]:
    return lambda _group: min(most, int(rng.expovariate(1 / mean)) + 1)


def test_groups_of_full_length_never_overfill_the_cache_from_the_first_size() -> None:
    first = first_size(
        most=64, kv_tokens=10_000, tokens_per_group=NUM_GENERATIONS * 100, max_num_seqs=10_000,
        requests_per_group=NUM_GENERATIONS,
    )  # fmt: skip
    assert first == 22  # 9,000 tokens / 400
    served = serve(ToyEngine(10_000), InflightWindow(first=first, most=64), lambda _: 100, num_steps=3000)
    assert served.num_preempted == 0


def test_short_completions_let_the_window_grow_until_the_cache_is_used() -> None:
    rng = random.Random(1)
    served = serve(
        ToyEngine(10_000), InflightWindow(first=5, most=1000), long_tailed(rng, mean=60, most=500),
        num_steps=6000, settled_after=3000,
    )  # fmt: skip
    assert min(served.sizes) > 10
    assert sum(served.usages) / len(served.usages) > 0.55


def test_a_window_that_follows_the_cache_preempts_a_small_share_of_what_the_upper_bound_would() -> None:
    follows = serve(
        ToyEngine(10_000), InflightWindow(first=5, most=100), long_tailed(random.Random(1), mean=60, most=500),
        num_steps=6000,
    )  # fmt: skip
    fixed = Fixed(first=100, most=100)
    overfull = serve(ToyEngine(10_000), fixed, long_tailed(random.Random(1), mean=60, most=500), num_steps=6000)
    assert overfull.num_preempted > 500
    assert follows.num_preempted < overfull.num_preempted / 50


class Fixed(InflightWindow):
    def observe(self, load: EngineLoad, *, num_inflight: int) -> None:
        """Do nothing."""


def test_completions_that_become_longer_make_it_smaller() -> None:
    rng = random.Random(1)
    window = InflightWindow(first=10, most=1000)

    def growing(group: int) -> int:
        return min(600, int(rng.expovariate(1 / (20 + group / 10))) + 1)

    served = serve(ToyEngine(10_000), window, growing, num_steps=3000)
    assert max(served.sizes) > 60
    assert window.size < max(served.sizes) / 2
    assert served.num_preempted < 100


def test_where_the_engine_decodes_no_more_at_once_about_a_group_waits_in_it() -> None:
    engine = ToyEngine(1_000_000, max_num_seqs=40)
    served = serve(
        engine, InflightWindow(first=64, most=64), long_tailed(random.Random(1), mean=50, most=200),
        num_steps=6000, settled_after=4000,
    )  # fmt: skip
    assert served.fewest_idle_groups < 3
    assert served.num_tokens / 2000 > 0.9 * 40, "the engine was not kept busy"


def test_it_stops_at_once_above_the_high_mark_and_starts_again_below() -> None:
    window = InflightWindow(first=10, most=10)
    window.observe(EngineLoad(kv_usage=HIGH + 0.05, num_running=40), num_inflight=10)
    assert window.size == int(10 * AIM / (HIGH + 0.05))
    window.observe(EngineLoad(kv_usage=0.1, num_running=40), num_inflight=8)
    assert window.size == 8


def test_requests_preempted_by_a_push_do_not_mean_a_full_cache() -> None:
    window = InflightWindow(first=10, most=10)
    window.observe(EngineLoad(kv_usage=0.5, num_running=40, num_recomputed=40), num_inflight=10)
    assert window.size == 10
    window.observe(EngineLoad(kv_usage=0.95, num_running=40, num_preempted=1), num_inflight=10)
    assert window.size == 6  # 10 groups need 1.25 of the cache; the target is 0.8


def test_it_does_not_grow_before_every_group_of_it_has_lived_its_life() -> None:
    window = InflightWindow(first=4, most=64)
    for _ in range(3):
        window.observe(EngineLoad(kv_usage=0.1, num_running=16), num_inflight=4)
        window.group_finished()
    assert window.size == 4
    window.group_finished()
    assert window.size == 6


def test_it_does_not_grow_while_fewer_groups_are_in_flight_than_it_allows() -> None:
    window = InflightWindow(first=4, most=64)
    for _ in range(40):
        window.observe(EngineLoad(kv_usage=0.1, num_running=12), num_inflight=3)
        window.group_finished()
    assert window.size == 4


@settings(max_examples=200)
@given(
    st.integers(-3, 100), st.integers(1, 64),
    st.lists(
        st.one_of(
            st.none(),
            st.tuples(
                st.floats(0, 1), st.integers(0, 500), st.integers(0, 500), st.integers(0, 50), st.integers(0, 64)
            ),
        ),
        max_size=200,
    ),
)  # fmt: skip
def test_whatever_the_engine_says_it_stays_between_one_and_the_upper_bound(
    first: int, most: int, said: list[tuple[float, int, int, int, int] | None]
) -> None:
    window = InflightWindow(first=first, most=most)
    for event in said:
        if event is None:
            window.group_finished()
        else:
            usage, running, waiting, preempted, inflight = event
            window.observe(EngineLoad(usage, running, waiting, preempted), num_inflight=inflight)
        assert 1 <= window.size <= most


@given(st.integers(1, 1024), st.integers(0, 10**7), st.integers(0, 10**6), st.integers(1, 4096), st.integers(1, 1024))
def test_the_first_size_fits_or_is_one(most: int, tokens: int, per_group: int, seqs: int, requests: int) -> None:
    size = first_size(
        most=most, kv_tokens=tokens, tokens_per_group=per_group, max_num_seqs=seqs, requests_per_group=requests
    )
    assert 1 <= size <= most
    assert size == 1 or (size * per_group <= tokens and (size - 2) * requests < seqs)
