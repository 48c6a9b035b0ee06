"""Exchanges between ranks whether each has written its share of a checkpoint, or why not.

Uses a separate gloo process group: a background thread sends the messages, and they must not come between the
collectives of training.
"""

from datetime import timedelta
from typing import Any

import torch

DEADLINE = timedelta(hours=1)
_MAX_SENTENCE_BYTES = 1024


class SavingGroup:
    """This rank's end of the exchange. Create it on all ranks at the same point.

    Args:
        num_ranks: Number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._num_ranks = num_ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=DEADLINE) if num_ranks > 1 else None

    def exchange(self, sentence: str) -> list[str]:
        """Return the sentences of all ranks, in rank order. All ranks must call this.

        Raises:
            OSError: A rank is gone, or did not answer within the deadline.
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
