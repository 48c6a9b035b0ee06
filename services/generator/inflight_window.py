"""Decides how many prompt groups one replica has in flight: as many as its engine's KV cache holds. Pure.

    KV cache    0 ............ AIM ..... HIGH .. 1
    the window      grows       |  stays   | shrinks, and nothing is claimed until enough groups have finished

The window is the most groups that may be in flight. It grows only after a *turnover*: as many groups have finished as
the window holds. By then, groups of every age have used the cache; a group that has just begun uses almost none. The
first size is one at which groups of full length fit (``first_size``). The window shrinks at once when the cache is too
full. It also shrinks after a turnover in which requests always waited inside the engine for reasons other than memory
(max_num_seqs), because they only grow stale there. Its size is between 1 and ``max_inflight_groups``. How many groups
are admitted at all is the trainer's decision (services/trainer/intake/admission.py).
"""

from dataclasses import dataclass

HIGH = 0.9
"""Share of the KV cache above which vLLM will soon have to preempt, because groups in flight keep growing."""
AIM = 0.8
"""Share of the KV cache that the window grows towards."""
_FASTEST_GROWTH = 1.5
_OVERFULL = 1.25
"""Assumed need of a cache that preempted, as a multiple of its size."""
_IDLE = 2.0
"""The window shrinks if this many groups' worth of requests always waited in the engine. One may wait, to start at
once.
"""


@dataclass(frozen=True)
class EngineLoad:
    """An engine's load since the last report: highest cache usage, current requests, and numbers of lost places.

    Args:
        kv_usage: Highest share of the KV cache in use, from 0 to 1.
        num_running: Requests being decoded; a group consists of several.
        num_waiting: Requests in the engine that are not being decoded.
        num_preempted: How often a request lost its place in the cache for lack of room.
        num_recomputed: How often a request lost its place because of a push that recomputes the cache.
    """

    kv_usage: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_recomputed: int = 0


class InflightWindow:
    """Adapts the number of prompt groups in flight to the load of the engine. ``size`` is the current limit.

    Args:
        first: Initial size, in groups.
        most: Largest size, in groups.
    """

    def __init__(self, *, first: int, most: int) -> None:
        self.most = most
        self.size = max(1, min(first, most))
        self._num_finished = 0
        self._peak = 0.0
        self._was_full = False
        self._num_idle: float | None = None
        """Smallest number of groups' worth of requests that waited in the engine during this turnover; None before a
        report.
        """

    def observe(self, load: EngineLoad, *, num_inflight: int) -> None:
        """Record the engine's load with ``num_inflight`` groups in flight.

        If the KV cache is too full, the window shrinks at once.
        """
        self._peak = max(self._peak, load.kv_usage)
        self._was_full |= num_inflight >= self.size
        in_engine = load.num_running + load.num_waiting
        num_idle = num_inflight * load.num_waiting / in_engine if in_engine else 0.0
        self._num_idle = num_idle if self._num_idle is None else min(self._num_idle, num_idle)
        if load.num_preempted:
            self._shrink(num_inflight, need=_OVERFULL)
        elif load.kv_usage > HIGH:
            self._shrink(num_inflight, need=load.kv_usage)

    def group_finished(self) -> None:
        """Count a finished group. Once as many have finished as the window holds, adapt its size.

        The window grows if it was full and the KV cache had room. It shrinks if requests always waited in the engine.
        """
        self._num_finished += 1
        if self._num_finished < self.size:
            return
        if self._num_idle is not None and self._num_idle >= _IDLE:
            self.size = max(1, self.size - int(self._num_idle) + 1)
        elif self._num_idle == 0 and self._was_full and self._peak < AIM:
            factor = min(_FASTEST_GROWTH, AIM / max(self._peak, AIM / _FASTEST_GROWTH))
            self.size = min(self.most, max(self.size + 1, int(self.size * factor)))
        self._begin_turnover()

    def _shrink(self, num_inflight: int, *, need: float) -> None:
        self.size = max(1, min(self.size, int(num_inflight * AIM / need)))
        self._begin_turnover()

    def _begin_turnover(self) -> None:
        self._num_finished = 0
        self._peak = 0.0
        self._was_full = False
        self._num_idle = None


def first_size(*, most: int, kv_tokens: int, tokens_per_group: int, max_num_seqs: int, requests_per_group: int) -> int:
    """Return the first size of the window: the groups that fit into ``HIGH`` of the KV cache at full length.

    It is at least 1, and at most one more than the groups that the engine can decode at once.

    Args:
        most: Largest size of the window, in groups.
        kv_tokens: Tokens that the KV cache holds.
        tokens_per_group: Most tokens of one group, its prompt counted once.
        max_num_seqs: Requests that the engine decodes at once.
        requests_per_group: Completions of one group.
    """
    fit = int(HIGH * kv_tokens) // max(1, tokens_per_group)
    decoded = -(-max_num_seqs // requests_per_group) + 1
    return max(1, min(most, fit, decoded))
