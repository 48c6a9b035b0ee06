"""The deadlines of the engine calls of a push."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.generator.engine.receiving_engine import ReceivingEngine, VllmReceivingEngine
from services.generator.receive import guarded_engine
from services.generator.receive.guarded_engine import GuardedEngine
from services.generator.worker.worker_reports import FAILURE, Progress
from shared.control import BeginRequest
from shared.errors import PushError, UnavailableError

pytestmark = pytest.mark.unit

BODY = BeginRequest(
    run_id="r", epoch=1, policy_version=1, names=["w"], dtype_names=["float32"], shapes=[[1]], timeout_s=0.1
)


class Workers:
    """An engine that is only asked for progress. It gives a set answer after a pause."""

    def __init__(self, *said: tuple[float, str, str | None]) -> None:
        self._said = list(said)

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        await asyncio.sleep(min(wait_s, 0.002))
        pause_s, phase, failure = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        time.sleep(pause_s)  # noqa: ASYNC251  as a process that is stopped
        return [Progress(phase, failure, None)]


async def test_the_failure_of_a_worker_is_raised_once_all_have_answered() -> None:
    class Core:
        async def call_utility_all_async(self, *_: Any) -> list[list[Any]]:
            return [[None, {FAILURE: "no memory"}]]

    parallel = SimpleNamespace(world_size=2, data_parallel_size=1)
    client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), engine_core=Core())
    engine = VllmReceivingEngine(client)
    try:
        with pytest.raises(PushError, match=r"^no memory$"):
            await engine.call_workers("load")
    finally:
        engine.close()


def guarded(workers: Workers) -> tuple[GuardedEngine, list[str]]:
    fatal: list[str] = []
    engine: Any = cast(ReceivingEngine, workers)
    return GuardedEngine(engine, keep_cache=False, grace_s=0.1, on_fatal=fatal.append), fatal


async def test_a_process_that_was_stopped_past_its_deadline_hears_what_its_workers_make_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_engine, "_STOPPED_S", 0.3)
    engine, fatal = guarded(Workers((0.5, "receiving", None), (0.0, "receiving", None), (0.0, "idle", "time is up")))
    with pytest.raises(PushError, match="receiving weights failed: time is up"):
        await engine.received(BODY)
    assert fatal == []


async def test_workers_that_are_still_at_it_after_their_deadline_are_fatal() -> None:
    engine, fatal = guarded(Workers((0.0, "receiving", None)))
    with pytest.raises(UnavailableError, match="receiving weights did not end within 0 s"):
        await engine.received(BODY)
    assert fatal == ["receiving weights did not end within 0 s"]


async def test_a_call_that_fails_because_the_engine_died_says_what_that_died_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check the message: vLLM's client says "See stack trace (above)" to users who do not see one."""
    (tmp_path / "failure").write_text("RuntimeError: Unsupported CPU attention configuration")
    monkeypatch.setenv("HEADRACE_ENGINE_FAILURE_FILE", str(tmp_path / "failure"))

    class Dead(Workers):
        async def abort_and_pause(self) -> None:
            raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

    engine, fatal = guarded(Dead())
    reason = "aborting all requests failed: RuntimeError: Unsupported CPU attention configuration"
    with pytest.raises(UnavailableError, match=reason):
        await engine.abort_and_pause()
    assert fatal == [reason]
