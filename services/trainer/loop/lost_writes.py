"""Notices that Redis was started again, or another one took its place, and admits again what it has lost.

A server that is killed may have acknowledged, a moment before, what it had not yet written to its file. A group whose
entry was among that would be waited for without an end. Not so one that the trainer has in hand: that is trained, or
its result taken, although no stream holds it. What others lost there is theirs to find: each consumer
looks for entries that are its own again, though it had handed them off (streams.py).
"""

import logging

from services.trainer.loop.admission import Admission
from services.trainer.loop.evaluation import Evaluations
from services.trainer.loop.ledger import Ledger
from services.trainer.loop.reconcile import missing_groups
from services.trainer.loop.scored_groups import ScoredGroups
from shared.keys import RunKeys
from shared.redis_connection import Redis
from shared.redis_restarts import RestartWatch

log = logging.getLogger(__name__)


class LostWrites:
    """Of one run, as its trainer sees it.

    Args:
        redis: Client of redis_connection.py.
        keys: Keys of the run.
        ledger: Of what was admitted and settled.
        scored: Has what the trainer has in hand.
        admission: Told of groups of which no trace is left.
        evaluations: Likewise.
        every_s: How often to look.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        ledger: Ledger,
        scored: ScoredGroups,
        admission: Admission,
        evaluations: Evaluations,
        every_s: float = 5.0,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._ledger = ledger
        self._scored = scored
        self._admission = admission
        self._evaluations = evaluations
        self._restarts = RestartWatch(redis, every_s=every_s)

    async def make_up(self) -> None:
        """Have what is missing admitted again if the server is another process than before.

        Raises:
            StateLostError: It has lost the whole run.
            UnavailableError: It does not answer.
        """
        if not await self._restarts.has_restarted():
            return
        log.info("Redis was started again: looking for groups that it has lost")
        missing = await missing_groups(self._redis, self._keys, self._ledger)
        in_hand = self._scored.numbers()
        self._admission.admit_again(number for number in missing if number not in in_hand)
        await self._evaluations.admit_again(in_hand=self._scored.evaluated_ids())
