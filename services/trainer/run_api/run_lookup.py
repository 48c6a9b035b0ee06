"""Finds the runs that match an id, a name, or the beginning of an id. run_reference.py chooses among them."""

from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore

MIN_BEGINNING = 8
MAX_READ = 100
MAX_SHOWN = 10
_PUNCTUATION = str.maketrans("", "", "-_.")


async def fitting(store: RunStore, reference: str) -> list[RunRecord]:
    """Return the runs with this id, name or beginning of an id, newest first; empty if none fits.

    At most 101 runs of one name are returned, and at most 11 whose ids begin with ``reference``.
    """
    if not is_reference(reference):
        return []
    record = await store.get(reference)
    if record is not None:
        return [record]
    ids = await store.index.named(reference, limit=MAX_READ + 1)
    found = [record for record in await store.get_all(ids) if record.name == reference]
    if not found and len(reference) >= MIN_BEGINNING:
        found = await store.get_all(await store.index.beginning_with(reference, limit=MAX_SHOWN + 1))
    return sorted(found, key=lambda record: (record.created_at_s, record.run_id), reverse=True)


def is_reference(text: str) -> bool:
    """Whether ``text`` could be a run's id or name. Anything else never reaches Redis."""
    return 0 < len(text) <= 64 and text.isascii() and text.translate(_PUNCTUATION).isalnum()
