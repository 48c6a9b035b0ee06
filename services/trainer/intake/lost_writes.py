"""Notices that Redis was restarted or replaced, and admits lost groups again.

A server that is killed may have acknowledged writes that it had not yet saved to disk. A group whose entry was lost
that way would be waited for forever. Groups that the trainer has in hand are an exception: they are trained, or their
evaluation results are used, although no stream holds them. Values that are only written when they change, such as the
required version, are written again. Other services recover their own lost writes: each consumer looks for entries of
its own that reappear after it handed them off (streams.py).
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from services.trainer.intake.evaluation import Evaluations
from services.trainer.intake.reconcile import missing_groups
from services.trainer.intake.scored_groups import ScoredGroups
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_restarts import RestartWatch

log = logging.getLogger(__name__)


class LostWrites:
    """Notices when Redis has lost writes of a run, and admits the lost groups again.

    Args:
        redis: Client of the Redis server that has the run's streams.
        keys: The run's keys.
        ledger: The groups that were admitted and settled.
        scored: The groups that the trainer has in hand.
        admission: Admits lost training groups again.
        evaluations: Admits lost evaluation groups again.
        write_again: Functions that write values again that Redis may have lost.
        every_s: How often to check, in seconds.
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
        write_again: Iterable[Callable[[], Awaitable[None]]],
        every_s: float = 5.0,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._ledger = ledger
        self._scored = scored
        self._admission = admission
        self._evaluations = evaluations
        self._write_again = tuple(write_again)
        self._restarts = RestartWatch(redis, every_s=every_s)

    async def make_up(self) -> None:
        """Make up for lost writes if the Redis server was restarted or replaced since the last call.

        Raises:
            FencedError: A newer incarnation owns the run.
            StateLostError: Redis has lost the whole run.
            UnavailableError: Redis does not answer.
        """
        if not await self._restarts.has_restarted():
            return
        log.info("Redis was restarted: looking for groups that it has lost")
        for write in self._write_again:
            await write()
        in_hand = self._scored.numbers()
        self._admission.admit_again(await missing_groups(self._redis, self._keys, self._ledger, in_hand=in_hand))
        await self._evaluations.admit_again(in_hand=self._scored.evaluated_ids())
