"""A pool with real workers for tools."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.sessions.tools.tool_tasks import ToolPool, ToolTasks
from shared.user_code.limits import Limits
from shared.user_code.places import Places

USER_CODE = Path(__file__).parent / "user_code"
LIMITS = Limits(8 << 30, 256)


class CountedWorkers:
    """The metrics of a pool."""

    def __init__(self) -> None:
        self.replaced: Counter[str] = Counter()

    def worker_replaced(self, reason: str) -> None:
        """See PoolMetrics."""
        self.replaced[reason] += 1

    def waiting_for_worker(self, lane: str) -> contextlib.AbstractContextManager[object]:
        """See PoolMetrics."""
        return contextlib.nullcontext(lane)


def tool_places(*directories: Path) -> Places:
    """Return the places of tools."""
    return Places(tuple(map(str, directories)), role="tool", service="sessions service")


@pytest.fixture
def workers() -> CountedWorkers:
    return CountedWorkers()


@pytest.fixture
async def pool(workers: CountedWorkers, tmp_path: Path) -> AsyncIterator[ToolPool]:
    """Return a pool with one worker, for tools in user_code and in the test's directory."""
    tasks = ToolTasks(tool_places(USER_CODE, tmp_path))
    async with ToolPool(
        tasks, num_workers=1, limits=LIMITS, queue_timeout_s=120.0, import_timeout_s=120.0, metrics=workers
    ) as pool:
        yield pool
