"""Says which faults strike, in which order: a pure function of the seed.

    deck: every fault on every victim, once, shuffled --> strikes of one fault or two --> the next deck, shuffled anew

Shuffled decks instead of independent draws: each cell of the table has had its turn before any has a second one. The
second fault of a pair is the next of the deck, or the first once more, on whatever has taken the victim's place.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILL, TERM, STOP = "kill -9", "SIGTERM", "SIGSTOP"
POWER_CUT, DISK_FULL, MAXMEMORY = "power cut", "disk full", "maxmemory"
DAMAGED_CHECKPOINT, CUT_AOF, BROKEN_AOF = "damaged checkpoint", "cut AOF", "broken AOF"

LAUNCHER, TRAINER, RANK, GENERATOR, ENGINE = "launcher", "trainer API", "rank", "generator", "engine worker"
REWARDER, FORK_SERVER, REWARD_WORKER, REDIS = "rewarder", "fork server", "reward worker", "Redis"
EVERYTHING, DISK = "everything", "disk"

SIGNALS = (KILL, TERM, STOP)
PROCESSES = (LAUNCHER, TRAINER, RANK, GENERATOR, ENGINE, REWARDER, FORK_SERVER, REWARD_WORKER, REDIS)
CELLS = (
    *((victim, kind) for victim in PROCESSES for kind in SIGNALS),
    (EVERYTHING, POWER_CUT),
    (DISK, DISK_FULL),
    (REDIS, MAXMEMORY),
    (RANK, DAMAGED_CHECKPOINT),
    (REDIS, CUT_AOF),
    (REDIS, BROKEN_AOF),
)
"""Every victim with every fault that it can suffer."""

_HELD_S = {STOP: (0.2, 4.0), DISK_FULL: (1.0, 10.0), MAXMEMORY: (1.0, 8.0), BROKEN_AOF: (2.0, 5.0)}
_HELD_LONG_S = {STOP: (17.0, 22.0), DISK_FULL: (90.0, 110.0), MAXMEMORY: (15.0, 25.0), BROKEN_AOF: (5.0, 10.0)}
"""A stop outlasts a lease (15 s); a full disk outlasts five starts of a rank."""
_LONG_SHARE = 0.15
_PAIR_SHARE = 0.3
_AGAIN_SHARE = 0.25
"""Of the pairs."""
_PAUSE_S = (0.0, 1.5)
_APART_S = (0.0, 3.0)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        victim: One of PROCESSES, EVERYTHING or DISK.
        kind: One of the faults above.
        held_s: How long it lasts; 0 for one that strikes and is over.
        dice: Seed of what the injector draws: which worker, which file, how many bytes.
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
        number: From 1.
        faults: One, or a pair.
        pause_s: How long the stack trains undisturbed before it.
        apart_s: Between the two of a pair.
    """

    number: int
    faults: tuple[Fault, ...]
    pause_s: float
    apart_s: float


def schedule(seed: int, cells: Sequence[tuple[str, str]] = CELLS) -> Iterator[Strike]:
    """Yield strikes without an end.

    Args:
        seed: All that they depend on, beside the cells.
        cells: (victim, fault) that may be drawn.
    """
    dice = random.Random(seed)  # not a secret
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
