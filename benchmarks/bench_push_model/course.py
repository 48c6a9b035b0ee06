"""The course of a transfer, chunk by chunk: which of its steps wait for each other. Pure.

trainer     make ready (gather, convert, pack) --> send            with one buffer, the next chunk is made ready
                                                    |              after the send; with two, beside it
generator                                           +--> stage     the next chunk is received after that
                                                          +--> digest, in a thread of its own
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """One chunk, with the seconds that each of its steps takes by itself."""

    num_bytes: int
    ready_s: float
    send_s: float
    stage_s: float
    digest_s: float


def course_s(chunks: Sequence[Chunk], *, num_buffers: int) -> float:
    """Return the seconds from the first parameter read to the last one digested.

    Args:
        chunks: The chunks, in order.
        num_buffers: Buffers of the sender: 1 or 2.
    """
    begun = sent = staged = digested = 0.0
    for chunk in chunks:
        ready = (begun if num_buffers == 2 else sent) + chunk.ready_s
        begun = max(ready, sent)
        sent = max(begun, staged) + chunk.send_s
        staged = sent + chunk.stage_s
        digested = max(digested, staged) + chunk.digest_s
    return digested
