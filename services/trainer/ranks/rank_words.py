"""Stores why a training rank ended, where its launcher and the other ranks can read it.

rank 1  -- "out of memory" --> store on node 0 --> rank 0, which only saw a connection close
                                               --> launcher, which only saw an exit status
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from services.trainer.ranks.exit_status import CRASHED

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Word:
    """The last words of a training rank: the reason why it ended, and its exit status."""

    message: str
    status: int
    """The rank's exit status."""
    is_loss: bool
    """Whether the rank only lost the others. Another rank knows the cause then."""
    at_s: float


def read_words(store: Any, *, num_ranks: int) -> dict[int, Word]:
    """Return the reasons that ended ranks have stored, by rank; empty if the store is gone."""
    import torch.distributed

    c10d: Any = torch.distributed
    words: dict[int, Word] = {}
    with suppress(RuntimeError, ValueError, TypeError):
        kept = c10d.PrefixStore("words", store)
        kept.set_timeout(timedelta(seconds=_TIMEOUT_S))
        for rank in range(num_ranks):
            if kept.check([str(rank)]):
                words[rank] = Word(**json.loads(kept.get(str(rank))))
    return words


def leave_word(message: str, *, status: int, is_loss: bool = False) -> None:
    """Store the reason why this training rank ends. Does nothing if torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    import torch.distributed

    c10d: Any = torch.distributed
    with suppress(RuntimeError):  # the store is gone, and its readers with it
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = c10d.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
        word = Word(message[:2000], status, is_loss, time.time())
        words = c10d.PrefixStore("words", store)
        words.set(os.environ["RANK"], json.dumps(asdict(word)))
        words.check([os.environ["RANK"]])  # waits until the store has the word: it acknowledges no set()


class LastWords:
    """Context manager that stores an exception as the reason why this rank ends, and lets it propagate."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Store the exception, if there is one."""
        if error is not None:
            leave_word(f"{type(error).__name__}: {error}", status=CRASHED)


def root_cause(words: dict[int, Word], killed: dict[int, int]) -> str:
    """Return the sentence that best explains why a group of ranks ended; empty if the cause is unknown.

    Args:
        words: The reasons that ranks have left (``read_words``), by rank.
        killed: Rank to the signal that killed it.
    """
    knowing = [(word.at_s, rank, word) for rank, word in words.items() if not word.is_loss]
    if knowing:
        _, rank, word = min(knowing, key=lambda found: found[:2])
        return word.message if rank == 0 else f"training rank {rank}: {word.message}"
    if killed:
        return "; ".join(f"training rank {rank} was killed by signal {number}" for rank, number in killed.items())
    return next((word.message for word in words.values()), "")
