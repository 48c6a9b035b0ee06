"""Exchanges errors between ranks, so that each rank learns whether all have written their shares of a checkpoint.

It uses a separate gloo process group, because a background thread sends the messages, and they must not come between
the collectives of training.
"""

from datetime import timedelta
from typing import Any

import torch

DEADLINE = timedelta(hours=1)
_MAX_SENTENCE_BYTES = 1024


class RankGoneError(OSError):
    """A rank is gone, or did not answer within an hour, so the checkpoint is not whole."""


class SavingGroup:
    """One rank's membership in the group that exchanges errors. All ranks must create it at the same point.

    Args:
        num_ranks: Number of ranks. One rank needs no process group.
    """

    def __init__(self, num_ranks: int) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._num_ranks = num_ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=DEADLINE) if num_ranks > 1 else None

    def exchange(self, sentence: str) -> list[str]:
        """Send an error message, or an empty string, and return the strings of all ranks in rank order.

        All ranks must call this. Only the first 1,024 bytes are sent.

        Raises:
            RankGoneError: A rank is gone, or did not answer within an hour.
        """
        if self._group is None:
            return [sentence]
        said = sentence.encode()[:_MAX_SENTENCE_BYTES]
        mine = torch.zeros(_MAX_SENTENCE_BYTES, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else 0
        everyone = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        try:
            self._dist.all_gather(everyone, mine, group=self._group)
        except RuntimeError as error:
            raise RankGoneError(f"a training rank was lost while the checkpoint was written: {error}") from error
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in everyone]
