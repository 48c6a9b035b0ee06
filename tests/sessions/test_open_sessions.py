"""Sessions for evaluation end with the service of their run."""

import asyncio
from typing import Any, cast

import pytest

from services.sessions.open_session import SessionOverError
from services.sessions.open_sessions import OpenSessions

pytestmark = pytest.mark.unit


async def test_a_session_that_is_opened_as_its_run_ends_is_over() -> None:
    sessions = OpenSessions(url="http://replica:1", max_sessions=1)
    async with sessions.serving("run-test", cast(Any, None), max_completion_length=8):
        opened = sessions.open_for_evaluation("run-test", deadline_s=60)  # its task has not begun when the block ends
    await asyncio.sleep(0)
    assert opened.over.done()
    with pytest.raises(SessionOverError):
        sessions.find(opened.session_id, [opened.api_key])
