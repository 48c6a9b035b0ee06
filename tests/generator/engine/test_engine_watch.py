"""An engine hangs that holds requests and ends no step, for as long as a step may take."""

import pytest

from services.generator.engine.engine_failure import EngineWatch

pytestmark = pytest.mark.unit

TIMEOUT_S = 10.0
LOOKS = int(TIMEOUT_S)


class ShownEngine:
    """An engine that is what the test says."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.num_unfinished = 0
        self.num_steps = 7


def looks(
    watch: EngineWatch, engine: ShownEngine, *, decoding_is_paused: bool = False, steps: int = 0
) -> list[str | None]:
    """Look as often as a step may take seconds, and once more."""
    found: list[str | None] = []
    for _ in range(LOOKS + 1):
        engine.num_steps += steps
        found.append(watch.look(engine, decoding_is_paused=decoding_is_paused))
    return found


def test_an_engine_that_ends_no_step_with_requests_in_it_hangs() -> None:
    engine, watch = ShownEngine(), EngineWatch(every_s=1.0, hang_timeout_s=TIMEOUT_S)
    looks(watch, engine)
    engine.num_unfinished = 3
    *before, last = looks(watch, engine)
    assert set(before) == {None}
    assert last is not None
    assert "3 requests" in last
    assert "HEADRACE_ENGINE_HANG_TIMEOUT_S" in last


def test_an_engine_that_steps_or_is_idle_or_is_held_does_not_hang() -> None:
    engine, watch = ShownEngine(), EngineWatch(every_s=1.0, hang_timeout_s=TIMEOUT_S)
    assert set(looks(watch, engine)) == {None}, "idle"
    engine.num_unfinished = 3
    assert set(looks(watch, engine, steps=1)) == {None}
    assert set(looks(watch, engine, decoding_is_paused=True)) == {None}, "for a push"


def test_one_step_begins_the_time_anew() -> None:
    engine, watch = ShownEngine(), EngineWatch(every_s=1.0, hang_timeout_s=TIMEOUT_S)
    looks(watch, engine)
    engine.num_unfinished = 1
    for _ in range(3):
        assert set(looks(watch, engine)[:-1]) == {None}
        engine.num_steps += 1
        assert watch.look(engine, decoding_is_paused=False) is None
