"""Reads external changes to a run in training: newer trainers, user requests, and groups that were begun or buried.

    Redis: incarnation, user requests, begun groups, dead letters --read--> requests, begun groups, drops in the ledger

Redis is read at most twice a second, so a batch is chosen on data up to half a second old. Only the list of begun
groups is read again right before a batch is chosen, and everything once more after the last step.
"""

import functools
import logging
import time
from collections.abc import Container, Iterable, Mapping

from services.trainer.fence import check_not_fenced
from services.trainer.groups.group_ids import group_id, is_evaluation, training_number
from services.trainer.groups.ledger import DEAD_LETTER, Ledger
from services.trainer.intake.evaluation import Evaluations
from services.trainer.intake.reward_failures import RewardFailures
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.run_context import RunContext
from services.trainer.telemetry.run_log import RunLog
from shared.lineage import LineageVersion
from shared.pause import Wishes
from shared.redis.redis_connection import patiently

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_PAGE = 64
"""Dead letters read at once; each has the payload of a group."""


class ExternalChanges:
    """Reads the changes that users, other services and newer trainers make to one run in Redis.

    Args:
        run: The run, whose record holds the users' requests.
        ledger: Records buried training groups.
        scored: Knows which groups have arrived, even if they were buried too.
        evaluations: Records buried evaluation groups.
        failures: Counts buried training groups.
        log: Reports buried groups to watchers.
        reported: The groups that the checkpoint records as buried: an earlier trainer has reported them.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        ledger: Ledger,
        scored: ScoredGroups,
        evaluations: Evaluations,
        failures: RewardFailures,
        log: RunLog,
        reported: Iterable[int] = (),
    ) -> None:
        self.wishes = Wishes()
        self.started: dict[int, int] = {}
        """Groups being sampled, being scored, or already here: number -> version at which sampling began."""
        self._run = run
        self._ledger = ledger
        self._scored = scored
        self._evaluations = evaluations
        self._failures = failures
        self._log = log
        self._reported = frozenset(reported)
        self._last_dead_letter = "-"
        self._read_at = 0.0

    @property
    def should_stop(self) -> bool:
        """Whether a user asked the run to stop."""
        return self.wishes.desired == "stop"

    async def read(self, *, at_once: bool = False) -> bool:
        """Read the changes, at most twice a second unless ``at_once``, and return whether they were read.

        Raises:
            FencedError: A newer incarnation owns the run.
            StateLostError: Redis has lost the run.
        """
        if not at_once and time.monotonic() - self._read_at < _EVERY_S:
            return False
        self._read_at = time.monotonic()
        await check_not_fenced(self._run.redis, self._run.keys, self._run.incarnation)
        self.wishes = await self._run.store.wishes(self._run.keys.run_id)
        await self._note_dead_letters()
        await self.read_started()
        return True

    async def read_started(self) -> None:
        """Read which groups generators have begun to sample, and with which policy version."""
        found = await patiently(
            lambda: self._run.redis.hgetall(self._run.keys.started), what="reading what is being sampled", timeout_s=60
        )
        self.started = dict(filter(None, (self._started(*entry) for entry in found.items())))

    def _started(self, label: bytes, version: bytes) -> tuple[int, int] | None:
        """Parse a begun group's number and policy version; None if invalid, or not an admitted training group."""
        number = training_number(label.decode(errors="replace"))
        if number is None or number >= self._ledger.admitted:
            return None
        try:
            return number, LineageVersion.parse(version.decode(errors="replace")).policy_version
        except ValueError as error:
            log.warning("the policy version that began group %s is unknown: %s", group_id(number), error)
            return None

    async def _note_dead_letters(self) -> None:
        is_last = False
        while not is_last:
            page = functools.partial(
                self._run.redis.xrange, self._run.keys.dead, min=self._last_dead_letter, count=_PAGE
            )
            letters = await patiently(page, what="reading dead letters", timeout_s=60)
            is_last = len(letters) < _PAGE
            here = self._scored.numbers()
            for entry_id, fields in letters:
                self._last_dead_letter = f"({entry_id.decode()}"
                await self._note_dead_letter(fields, here=here)
        self._reported = frozenset()  # a dead letter read from now on is a new one

    async def _note_dead_letter(self, fields: Mapping[bytes, bytes], *, here: Container[int]) -> None:
        label = fields.get(b"group_id", b"").decode(errors="replace")
        number = training_number(label)
        if is_evaluation(label):
            self._evaluations.lose(label)
        elif number is not None and number < self._ledger.admitted and number not in here:
            is_new = not self._ledger.is_settled(number)
            self._ledger.record_dropped(number, DEAD_LETTER)
            reason = fields.get(b"reason", b"").decode(errors="replace")
            if is_new:  # otherwise, an earlier trainer has counted it
                self._failures.note_buried(number, reason)
            if number not in self._reported:
                await self._log.event("log", {"message": f"group {label} was buried: {reason}"})
