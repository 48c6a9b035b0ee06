"""Which texts go through the model together: pure.

    lane A: [call, call] --+
    lane B: [call] --------+--> a round: whole calls, lanes in turn --> passes: by length, longest first
    lane C: [call, call] --+

A pass is padded to its longest text, so texts of like length go together. A round is bounded: who comes during one
waits for a few passes, not for all that is queued.
"""

from collections import deque
from collections.abc import Mapping, Sequence

PASSES_A_ROUND = 4


def next_round(lanes: dict[str, deque[int]], num_tokens: Mapping[int, int], *, max_batch_tokens: int) -> list[int]:
    """Take the calls of the next round out of ``lanes`` and return them.

    Args:
        lanes: The ids of waiting calls, by lane. Lanes that had their turn go to the end, empty ones go.
        num_tokens: Of each waiting call.
        max_batch_tokens: Of one pass; a round has at most as many as PASSES_A_ROUND of them, or is one call.
    """
    taken: list[int] = []
    total = 0
    while lanes:
        lane = next(iter(lanes))
        queue = lanes[lane]
        total += num_tokens[queue[0]]
        if taken and total > PASSES_A_ROUND * max_batch_tokens:
            break
        taken.append(queue.popleft())
        del lanes[lane]
        if queue:
            lanes[lane] = queue
    return taken


def passes(lengths: Sequence[int], *, max_batch_tokens: int) -> list[list[int]]:
    """Return indices into ``lengths``, pass by pass, longest first.

    A pass has at most ``max_batch_tokens`` with padding, or one text.
    """
    found: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found and (len(found[-1]) + 1) * longest <= max_batch_tokens:
            found[-1].append(index)
        else:
            found.append([index])
            longest = lengths[index]
    return found
