"""Decides which texts a reward model scores together. No I/O.

    lane A: [call, call] --+
    lane B: [call] --------+--> a round: whole calls, lanes in turn --> passes: by length, longest first
    lane C: [call, call] --+

A lane is the queue of one run, or of HTTP requests. A pass is one forward pass of the model. It is padded to its
longest text, so texts of similar length go together. A round has a size limit: a call that arrives during a round waits
for a few passes, not for all queued calls.
"""

from collections import deque
from collections.abc import Mapping, Sequence

PASSES_A_ROUND = 4


def next_round(lanes: dict[str, deque[int]], num_tokens: Mapping[int, int], *, max_batch_tokens: int) -> list[int]:
    """Choose the waiting calls that are scored next, remove their ids from ``lanes``, and return the ids.

    Args:
        lanes: The ids of waiting calls, by lane. A lane that had its turn moves to the end. An empty lane is removed.
        num_tokens: The number of tokens of each waiting call, by the call's id.
        max_batch_tokens: Most tokens in a pass. A round has at most 4 times as many, unless it is a single call.
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
    """Group texts into forward passes, and return each pass as indices into ``lengths``, longest texts first.

    A pass has at most ``max_batch_tokens`` tokens including padding, unless it is a single text.
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
