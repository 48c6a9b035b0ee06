"""Decides which faults strike in which order: a pure function of the seed.

    deck: every fault on every victim, once, shuffled --> strikes of one fault or two --> the next deck, shuffled anew

Decks are shuffled instead of drawing faults independently, so that no cell of the table comes a second time before all
others have come once. The second fault of a pair is the next of the deck. Or it is the first one again, on the process
that has replaced the victim.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILL, TERM, STOP = "kill -9", "SIGTERM", "SIGSTOP"
POWER_CUT, DISK_FULL, MAXMEMORY = "power cut", "disk full", "maxmemory"
DAMAGED_CHECKPOINT, CUT_AOF, BROKEN_AOF = "damaged checkpoint", "cut AOF", "broken AOF"

LAUNCHER, TRAINER, RANK, GENERATOR, ENGINE = "launcher", "trainer API", "rank", "generator", "engine worker"
REWARDER, FORK_SERVER, REWARD_WORKER, REDIS = "rewarder", "fork server", "reward worker", "Redis"
SESSIONS, TOOL_WORKER = "sessions", "tool worker"
EVERYTHING, DISK = "everything", "disk"

SIGNALS = (KILL, TERM, STOP)
PROCESSES = (
    LAUNCHER,
    TRAINER,
    RANK,
    GENERATOR,
    ENGINE,
    REWARDER,
    FORK_SERVER,
    REWARD_WORKER,
    SESSIONS,
    TOOL_WORKER,
    REDIS,
)
CELLS = (
    *((victim, kind) for victim in PROCESSES for kind in SIGNALS),
    (EVERYTHING, POWER_CUT),
    (DISK, DISK_FULL),
    (REDIS, MAXMEMORY),
    (RANK, DAMAGED_CHECKPOINT),
    (REDIS, CUT_AOF),
    (REDIS, BROKEN_AOF),
)
"""Every pair of a victim and a fault that it can suffer."""

_HELD_S = {STOP: (0.2, 4.0), DISK_FULL: (1.0, 10.0), MAXMEMORY: (1.0, 8.0), BROKEN_AOF: (2.0, 5.0)}
_HELD_LONG_S = {STOP: (17.0, 22.0), DISK_FULL: (90.0, 110.0), MAXMEMORY: (15.0, 25.0), BROKEN_AOF: (5.0, 10.0)}
"""A long stop is longer than a lease (15 s); a long full disk outlasts five starts of a rank."""
_LONG_SHARE = 0.15
_PAIR_SHARE = 0.3
_AGAIN_SHARE = 0.25
"""Share of the pairs that repeat their first fault."""
_PAUSE_S = (0.0, 1.5)
_APART_S = (0.0, 3.0)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        victim: An element of PROCESSES, or EVERYTHING or DISK.
        kind: The kind of fault, as named above.
        held_s: How long it lasts, in seconds; 0 for a momentary fault.
        dice: Random seed for the injector's choices: worker, file, number of bytes.
    """

    victim: str
    kind: str
    held_s: float
    dice: int

    def __str__(self) -> str:
        held = f" for {self.held_s:.1f} s" if self.held_s else ""
        return f"{self.kind} of {self.victim}{held}" if self.kind in SIGNALS else f"{self.kind}{held}"


@dataclass(frozen=True)
class Strike:
    """Faults that strike together.

    Attributes:
        number: Number of the strike, from 1.
        faults: One fault, or a pair.
        pause_s: Seconds that the stack trains undisturbed before the strike.
        apart_s: Seconds between the two faults of a pair.
    """

    number: int
    faults: tuple[Fault, ...]
    pause_s: float
    apart_s: float


def schedule(seed: int, cells: Sequence[tuple[str, str]] = CELLS) -> Iterator[Strike]:
    """Yield an endless sequence of strikes.

    Args:
        seed: Determines the sequence, together with ``cells``.
        cells: The (victim, fault) pairs to draw from.
    """
    dice = random.Random(seed)  # not used for secrets
    number, hand = 0, list[tuple[str, str]]()
    while True:
        number += 1
        is_pair = dice.random() < _PAIR_SHARE
        is_again = is_pair and (len(cells) == 1 or dice.random() < _AGAIN_SHARE)
        num_drawn = 2 if is_pair and not is_again else 1
        if len(hand) < num_drawn:
            hand += dice.sample(cells, len(cells))
        drawn, hand = hand[:num_drawn], hand[num_drawn:]
        if is_again:
            drawn = [*drawn, *drawn]
        faults = tuple(_fault(dice, victim, kind) for victim, kind in drawn)
        yield Strike(number, faults, pause_s=dice.uniform(*_PAUSE_S), apart_s=dice.uniform(*_APART_S))


def _fault(dice: random.Random, victim: str, kind: str) -> Fault:
    bounds = (_HELD_LONG_S if dice.random() < _LONG_SHARE else _HELD_S).get(kind)
    held_s = round(dice.uniform(*bounds), 1) if bounds else 0.0
    return Fault(victim, kind, held_s, dice.getrandbits(32))
