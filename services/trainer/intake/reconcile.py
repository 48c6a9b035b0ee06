"""Accounts for every group ever admitted, when a trainer resumes.

settled in the checkpoint: stays so | on a stream: in flight | a dead letter: dropped | nowhere: admitted again

Groups admitted since the checkpoint are read from the set of entries of the prompts stream, which the trainer updates
atomically with each admission. The labels of entries and dead letters are not trusted for this, because other clients
may write arbitrary ones.

Prompts that were admitted after the checkpoint and are not sampled yet are withdrawn first, and admitted again in their
turn. The steps since the checkpoint are repeated with the groups that were sampled for them. A prompt sampled
meanwhile, by weights as old as the checkpoint, would be too stale before a batch has a place for it.
"""

import functools
import logging
from collections.abc import Collection, Iterable

from services.trainer.groups.group_ids import is_evaluation, training_number
from services.trainer.groups.ledger import DEAD_LETTER, Ledger
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, call, patiently

log = logging.getLogger(__name__)

_PAGE = 64
_MEMBERS = 1000


async def withdraw_unsampled(redis: Redis, keys: RunKeys, ledger: Ledger, *, incarnation: int) -> int:
    """Withdraw prompts admitted after the checkpoint of ``ledger``, and leftover prompts of older evaluations.

    Withdrawn training groups still count as admitted, and are missing until they are admitted again. If a generator is
    sampling such a group at this moment, its result may still arrive, and is then trained. Returns the number of
    withdrawn prompts.

    Raises:
        FencedError: A newer incarnation owns the run.
    """
    checkpointed = ledger.admitted
    admitted = _numbers(await _members(redis, keys.seen(keys.prompts)))
    ledger.admitted = max([checkpointed, *(number + 1 for number in admitted)])
    entries = [
        (entry_id, label)
        for entry_id, label in await _entries_on(redis, keys.prompts)
        if is_evaluation(label) or ((number := training_number(label)) in admitted and number >= checkpointed)
    ]
    num_withdrawn = 0
    for start in range(0, len(entries), _PAGE):
        some = entries[start : start + _PAGE]
        num_withdrawn += await call(
            redis,
            "headrace_withdraw",
            keys=(
                keys.epoch, keys.prompts, keys.started, keys.seen(keys.prompts),
                *(keys.sessions(label) for _, label in some),
            ),
            args=(incarnation, GENERATORS, *(part for entry in some for part in entry)),
        )  # fmt: skip
    if num_withdrawn:
        log.info("withdrew %d prompts until the steps since the checkpoint are repeated", num_withdrawn)
    return num_withdrawn


async def missing_groups(redis: Redis, keys: RunKeys, ledger: Ledger, *, in_hand: Collection[int] = ()) -> list[int]:
    """Return the unsettled groups, by number, that are neither on a stream, nor dead letters, nor ``in_hand``.

    The ledger is updated first: all admitted groups are counted, and dead letters are recorded as dropped. Groups in
    hand are not dropped, even if a consumer buried them.
    """
    admitted = _numbers(await _members(redis, keys.seen(keys.prompts)))
    ledger.admitted = max([ledger.admitted, *(number + 1 for number in admitted)])
    in_flight = _numbers(await groups_in_flight(redis, keys))
    for number in _numbers(await buried(redis, keys)):
        if number < ledger.admitted and number not in in_hand:
            ledger.record_dropped(number, DEAD_LETTER)
    missing = [number for number in ledger.in_flight() if number not in in_flight and number not in in_hand]
    if missing:
        log.warning("admitting %d lost groups again", len(missing))
    return missing


async def groups_in_flight(redis: Redis, keys: RunKeys) -> set[str]:
    """Return the ids of all groups on the streams, evaluations included.

    The streams are scanned in the direction of flow, so a group that moves on meanwhile is seen at least once.
    """
    found: set[str] = set()
    for stream in (keys.prompts, keys.completions, keys.scored):
        found |= await _groups_on(redis, stream)
    return found


async def buried(redis: Redis, keys: RunKeys) -> set[str]:
    """Return the group ids of all dead letters, evaluation groups included."""
    return await _groups_on(redis, keys.dead)


async def _groups_on(redis: Redis, stream: str) -> set[str]:
    return {label for _, label in await _entries_on(redis, stream)}


async def _entries_on(redis: Redis, stream: str) -> list[tuple[str, str]]:
    """Return (entry id, group id) of all entries of a stream."""
    found: list[tuple[str, str]] = []
    after = "-"
    while after:
        page = functools.partial(redis.xrange, stream, min=after, count=_PAGE)
        entries = await patiently(page, what=f"scanning {stream}", timeout_s=60)
        found += [
            (entry_id.decode(), fields.get(b"group_id", b"").decode(errors="replace")) for entry_id, fields in entries
        ]
        after = f"({entries[-1][0].decode()}" if len(entries) == _PAGE else ""
    return found


async def _members(redis: Redis, key: str) -> set[str]:
    found: set[str] = set()
    cursor, is_first = 0, True
    while cursor or is_first:
        page = functools.partial(redis.sscan, key, cursor=cursor, count=_MEMBERS)
        cursor, names = await patiently(page, what=f"reading {key}", timeout_s=60)
        found |= {name.decode(errors="replace") for name in names}
        is_first = False
    return found


def _numbers(labels: Iterable[str]) -> set[int]:
    return {number for label in labels if (number := training_number(label)) is not None}
