"""Ranks tell each other that they have written their share of a checkpoint, or why not.

A process group of its own, on gloo: the messages are sent by a background thread, and must not come between the
collectives of training.
"""

from datetime import timedelta
from typing import Any

import torch

DEADLINE = timedelta(hours=1)
_MAX_SENTENCE_BYTES = 1024


class SavingGroup:
    """This rank's end of it. To be made on all ranks at once.

    Args:
        num_ranks: How many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._num_ranks = num_ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=DEADLINE) if num_ranks > 1 else None

    def exchange(self, sentence: str) -> list[str]:
        """Return what every rank said, in the order of the ranks; to be called by all of them.

        Raises:
            OSError: A rank is gone, or said nothing within the deadline.
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
            raise OSError(f"a training rank was lost while the checkpoint was written: {error}") from error
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in everyone]
