"""Deletes uploads that no run has used for a while. Uploads of runs that have not ended count as used."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, cast

from shared.errors import HeadraceError
from shared.redis.run_store import RunStore

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 3600.0


class ClientFiles(Protocol):
    """A store of files or modules that clients have uploaded. Every method blocks."""

    def use(self, *texts: str) -> None:
        """Delay the expiry of all uploads that are named in ``texts``, which come from a run's settings."""
        ...

    def expire(self, in_use: Collection[str], *, after_s: float) -> int:
        """Delete uploads not used for ``after_s`` seconds that no text in ``in_use`` names; return their number."""
        ...


async def expire_for_ever(stores: Sequence[ClientFiles], runs: RunStore, *, after_s: float) -> None:
    """Delete uploads not used for ``after_s`` seconds: at once, and then at least once an hour until cancelled."""
    while True:
        for store in stores:
            try:
                await expire_once(store, runs, after_s=after_s)
            except (HeadraceError, OSError) as error:
                log.warning("uploads are not looked through now: %s", error)
        await asyncio.sleep(min(after_s / 10, _LONGEST_PAUSE_S))


async def expire_once(store: ClientFiles, runs: RunStore, *, after_s: float) -> None:
    """Delete uploads not used for ``after_s`` seconds, but none that a queued, running or paused run names."""
    live = [*await runs.queued(), *await runs.served()]
    in_use = {text for record in live for text in texts_in(record.config)}
    num_deleted = await asyncio.to_thread(store.expire, in_use, after_s=after_s)
    if num_deleted:
        log.info("deleted %d uploads that were not used for %g s", num_deleted, after_s)


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts among the values of a run's settings, at any depth."""
    waiting: list[Any] = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += cast("dict[str, Any]", found).values()
        elif isinstance(found, list):
            waiting += found
