"""Computes continuous batching: how many tokens each sequence has at what time, without a tick for each token.

    submitted --> [waiting: more than max_num_seqs] --> first token after first_token_s --> decoding --> finished

While c sequences decode, a step gives each of them one token and takes ``step_s(c)``. Between two events c is constant,
so the number of steps is the elapsed time divided by ``step_s(c)``, and the next sequence to finish is known. A pause
stops all of this. Pure: the caller passes the time.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.lineage import NO_WEIGHTS, LineageVersion

Span = tuple[LineageVersion, int, int]


@dataclass(eq=False)
class DecodedSequence:
    """One sequence that the decode clock is decoding.

    Attributes:
        num_tokens: Final length.
        first_token_s: Simulated seconds from its admission to the batch until its first token.
        spans: (version, start, end) over its tokens; empty until it has finished.
        joined_at_step: Step of its first token. This attribute and those below are used only by the clock.
    """

    num_tokens: int
    first_token_s: float
    spans: list[Span] = field(default_factory=list[Span])
    joined_at_step: float | None = None
    joined_at_version: LineageVersion = NO_WEIGHTS
    first_change: int = 0
    is_aborted: bool = False


class DecodeClock:
    """Simulates the continuous batch of one engine. All times are in simulated seconds and never decrease.

    Args:
        step_s: Returns the duration of a decode step for a number of sequences.
        max_num_seqs: Maximum number of sequences in the batch.
    """

    def __init__(self, *, step_s: Callable[[int], float], max_num_seqs: int) -> None:
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._now_s = 0.0
        self._active_s = 0.0
        self._num_steps = 0.0
        self._is_paused = False
        self._version = NO_WEIGHTS
        self._changes: list[tuple[float, LineageVersion]] = []
        self._order = itertools.count()
        self._waiting: deque[DecodedSequence] = deque()
        self._prefilling: list[tuple[float, int, DecodedSequence]] = []
        self._decoding: list[tuple[float, int, DecodedSequence]] = []
        self._num_prefilling = 0
        self._num_decoding = 0

    @property
    def num_admitted(self) -> int:
        """Number of sequences in the batch."""
        return self._num_prefilling + self._num_decoding

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a place in the batch."""
        return len(self._waiting)

    def submit(self, sequence: DecodedSequence) -> None:
        """Add a sequence; call ``advance`` first."""
        self._waiting.append(sequence)
        self._admit()

    def abort(self, sequence: DecodedSequence) -> None:
        """Drop a sequence that has not finished; call ``advance`` first."""
        if sequence.is_aborted or sequence.spans:
            return
        sequence.is_aborted = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence.joined_at_step is None:
            self._num_prefilling -= 1
        else:
            self._num_decoding -= 1
        self._admit()

    def pause(self) -> None:
        """Stop decoding; call ``advance`` first."""
        self._is_paused = True

    def resume(self) -> None:
        """Resume decoding; call ``advance`` first."""
        self._is_paused = False

    def set_version(self, version: LineageVersion) -> None:
        """Sample with another policy version from the next token on; call ``advance`` first."""
        self._version = version
        self._changes.append((self._num_steps, version))

    def advance(self, now_s: float) -> list[DecodedSequence]:
        """Advance the simulation to ``now_s``, and return the sequences that finished meanwhile, in order."""
        left_s, self._now_s = max(0.0, now_s - self._now_s), max(now_s, self._now_s)
        finished: list[DecodedSequence] = []
        if self._is_paused:
            return finished
        while (until_s := self._until_next_event()) is not None and until_s <= left_s:
            left_s -= until_s
            self._move(until_s)
            finished += self._settle()
        self._move(left_s)
        return finished

    def next_event_s(self) -> float | None:
        """Return when the next sequence starts or finishes; None while paused, or if no sequence is in the batch."""
        until_s = None if self._is_paused else self._until_next_event()
        return None if until_s is None else self._now_s + until_s

    def num_tokens(self, sequence: DecodedSequence) -> int:
        """Return how many tokens a sequence has now."""
        joined = sequence.joined_at_step
        return 0 if joined is None else min(sequence.num_tokens, 1 + math.floor(self._num_steps - joined))

    def _admit(self) -> None:
        while self._waiting and self._num_prefilling + self._num_decoding < self._max_num_seqs:
            sequence = self._waiting.popleft()
            entry = (self._active_s + sequence.first_token_s, next(self._order), sequence)
            heapq.heappush(self._prefilling, entry)
            self._num_prefilling += 1

    def _until_next_event(self) -> float | None:
        for heap in (self._prefilling, self._decoding):
            while heap and heap[0][2].is_aborted:
                heapq.heappop(heap)
        joins_in = self._prefilling[0][0] - self._active_s if self._prefilling else math.inf
        finishes_in = math.inf
        if self._decoding:
            finishes_in = (self._decoding[0][0] - self._num_steps) * self._step_s(self._num_decoding)
        until_s = max(0.0, min(joins_in, finishes_in))
        return None if math.isinf(until_s) else until_s

    def _move(self, duration_s: float) -> None:
        self._active_s += duration_s
        if self._num_decoding:
            self._num_steps += duration_s / self._step_s(self._num_decoding)

    def _settle(self) -> list[DecodedSequence]:
        """Let due sequences get their first token or finish, and return the finished ones.

        A remainder within rounding errors counts as elapsed.
        """
        while self._prefilling and self._prefilling[0][0] <= self._active_s + _ROUNDING:
            sequence = heapq.heappop(self._prefilling)[2]
            if not sequence.is_aborted:
                self._join(sequence)
        finished: list[DecodedSequence] = []
        while self._decoding and self._decoding[0][0] <= self._num_steps + _ROUNDING:
            sequence = heapq.heappop(self._decoding)[2]
            if not sequence.is_aborted:
                self._num_decoding -= 1
                sequence.spans = self._spans(sequence)
                finished.append(sequence)
        self._admit()
        return finished

    def _join(self, sequence: DecodedSequence) -> None:
        self._num_prefilling -= 1
        self._num_decoding += 1
        sequence.joined_at_step = self._num_steps
        sequence.joined_at_version = self._version
        sequence.first_change = len(self._changes)
        entry = (self._num_steps + sequence.num_tokens - 1, next(self._order), sequence)
        heapq.heappush(self._decoding, entry)

    def _spans(self, sequence: DecodedSequence) -> list[Span]:
        joined = sequence.joined_at_step
        assert joined is not None
        spans: list[Span] = []
        version, start = sequence.joined_at_version, 0
        for step, next_version in self._changes[sequence.first_change :]:
            end = min(sequence.num_tokens, 1 + math.floor(step - joined + _ROUNDING))
            if end > start:
                spans.append((version, start, end))
                start = end
            version = next_version
        if start < sequence.num_tokens:
            spans.append((version, start, sequence.num_tokens))
        return spans


_ROUNDING = 1e-9
