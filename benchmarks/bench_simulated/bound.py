"""Computes the rate that staleness and lengths would allow: the same replicas and rules, without any other costs.

    admission rule --> the replica with the fewest groups --> [DecodeClock] --> batch rule --> next version

Groups are drawn and decoded as in simulated replicas, and admitted and awaited by the trainer's own rules. Messages,
steps and pushes take no time. The gap between a real fleet and this bound is the cost of streams, services and pushes.
The gap between this bound and N times a single replica is the cost of the staleness bound: a batch waits for its
longest group.
"""

import heapq
import itertools

from benchmarks.bench_simulated.load import Load
from services.generator.simulated.decode_clock import DecodeClock, DecodedSequence
from services.generator.simulated.draws import Draws
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulation_settings import SimulationSettings
from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import stragglers, window

_STEPS_LEFT = 1 << 40
_ROUNDING = 1e-9


def groups_per_s(load: Load, *, num_steps: int) -> float:
    """Return the rate of arrivals at the trainer over ``num_steps`` steps, in groups per second of real time."""
    fleet = _Fleet(load)
    began_s, num_before = 0.0, 0
    for step in range(load.warmup_steps + num_steps):
        if step == load.warmup_steps:
            began_s, num_before = fleet.now_s, fleet.num_arrived
        fleet.make_step()
    return (fleet.num_arrived - num_before) / (fleet.now_s - began_s) * fleet.settings.speed_up


class _Replica:
    def __init__(self, settings: SimulationSettings, index: int) -> None:
        self.draws = Draws(settings, ModelFacts(vocab_size=2, eos_token_id=None, max_positions=None), index=index)
        self.clock = DecodeClock(step_s=settings.decode_step_s, max_num_seqs=settings.max_num_seqs)
        self.group_of: dict[DecodedSequence, int] = {}
        self.num_left: dict[int, int] = {}

    def begin(self, number: int, load: Load) -> None:
        """Start a group; call ``advance`` first."""
        self.num_left[number] = load.num_generations
        for _ in range(load.num_generations):
            drawn = self.draws.completion(max_tokens=load.max_completion_length)
            first_token_s = self.draws.first_token_s(num_prompt_tokens=load.num_prompt_tokens)
            sequence = DecodedSequence(len(drawn.token_ids), first_token_s)
            self.group_of[sequence] = number
            self.clock.submit(sequence)

    def advance(self, now_s: float) -> list[int]:
        """Return the groups that are complete at ``now_s``."""
        complete: list[int] = []
        for sequence in self.clock.advance(now_s):
            number = self.group_of.pop(sequence)
            self.num_left[number] -= 1
            if not self.num_left[number]:
                del self.num_left[number]
                complete.append(number)
        return complete


class _Fleet:
    def __init__(self, load: Load) -> None:
        self.settings = SimulationSettings.model_validate(dict(load.simulation))
        self.now_s = 0.0
        self.num_arrived = 0
        self._load = load
        self._version = 0
        self._shape = BatchShape(load.groups_per_replica * load.num_replicas)
        self._replicas = [_Replica(self.settings, index) for index in range(load.num_replicas)]
        self._numbers = itertools.count()
        self._unfinished: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._events: list[tuple[float, int]] = []

    def make_step(self) -> None:
        """Continue until a batch may be trained, and train it."""
        self._admit()
        while not (batch := self._batch()):
            num_before = self.num_arrived
            while self.num_arrived == num_before:
                self._go_on()
        for number in batch:
            del self._waiting[number]
        self._version += 1

    def _admit(self) -> None:
        limit = window(num_steps_left=_STEPS_LEFT, max_staleness=self._load.max_staleness, shape=self._shape)
        count = max(0, limit - len(self._unfinished) - len(self._waiting))
        for number in itertools.islice(self._numbers, count):
            index = min(range(len(self._replicas)), key=lambda at: len(self._replicas[at].num_left))
            self._advance(index)
            self._unfinished[number] = self._version
            self._replicas[index].begin(number, self._load)
            self._look_again(index)

    def _go_on(self) -> None:
        at_s, index = heapq.heappop(self._events)
        if at_s != self._replicas[index].clock.next_event_s():
            return  # the replica's next event has changed, and the new one has its own entry
        self.now_s = max(self.now_s, at_s + _ROUNDING)
        self._advance(index)
        self._look_again(index)

    def _advance(self, index: int) -> None:
        for number in self._replicas[index].advance(self.now_s):
            self._waiting[number] = self._unfinished.pop(number)
            self.num_arrived += 1

    def _look_again(self, index: int) -> None:
        at_s = self._replicas[index].clock.next_event_s()
        if at_s is not None:
            heapq.heappush(self._events, (at_s, index))

    def _batch(self) -> list[int]:
        oldest_first = sorted(self._waiting, key=lambda number: (self._waiting[number], number))
        chosen, left_out = (
            oldest_first[: self._shape.groups_per_step],
            oldest_first[self._shape.groups_per_step :],
        )
        if len(chosen) < self._shape.groups_per_step:
            return []
        late = stragglers(
            left_out={number: self._waiting[number] for number in left_out},
            unfinished=self._unfinished,
            policy_version=self._version,
            max_staleness=self._load.max_staleness,
            shape=self._shape,
        )
        return [] if late else chosen
