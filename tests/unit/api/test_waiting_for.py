"""Why a run is waiting, in one sentence made from what can be seen from outside."""

from typing import Any

import pytest

from services.trainer.run_api.run_view import GeneratorView, Queues, Surroundings, waiting_for
from shared.run_store import Progress, RunRecord

NOW_S = 1000.0
ALIVE = GeneratorView(replica_id="generator-0", url="http://127.0.0.1:1", is_alive=True)
DEAD = GeneratorView(replica_id="generator-1", url="http://127.0.0.1:2", is_alive=False)


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "run_id": "run-a",
        "config": {},
        "status": "running",
        "desired": "run",
        "reason": "",
        "created_at_s": 900.0,
        "started_at_s": 950.0,
        "ended_at_s": None,
        "run_dir": "/runs/run-a",
        "progress": Progress(waiting_for="scored groups", updated_at_s=999.0),
    }
    return RunRecord(**(values | changes))


def surroundings(**changes: Any) -> Surroundings:
    values: dict[str, Any] = {
        "current_run": "run-a",
        "queues": Queues(),
        "generators": [ALIVE],
        "num_rewarders": 1,
    }
    return Surroundings(**(values | changes))


def reason(run: RunRecord, around: Surroundings | None = None, *, note: str = "") -> str | None:
    return waiting_for(run, around or surroundings(), note=note, stale_after_s=30.0, now_s=NOW_S)


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_waits_for_nothing(status: str) -> None:
    assert reason(record(status=status), note="its training rank") is None


def test_a_working_run_says_what_its_rank_says() -> None:
    assert reason(record()) == "scored groups"
    assert reason(record(progress=Progress(waiting_for="", updated_at_s=999.0))) is None


def test_a_queued_run_names_the_one_before_it() -> None:
    queued = record(status="queued", started_at_s=None, progress=Progress())
    assert (reason(queued, surroundings(current_run="run-b")) or "").startswith("run run-b to end")
    assert reason(queued, surroundings(current_run=None)) == "its training rank to be started"
    assert reason(queued) == "its training rank to be started"


def test_what_the_supervisor_knows_comes_first() -> None:
    assert reason(record(), surroundings(generators=[]), note="its training rank, which crashed") == (
        "its training rank, which crashed"
    )


def test_a_silent_rank_is_reported_with_its_log() -> None:
    silent = record(progress=Progress(waiting_for="scored groups", updated_at_s=969.0))
    assert reason(silent) == (
        "its training rank, which has not reported for 31 s; what it said last is in /runs/run-a/rank.log"
    )


def test_a_rank_that_was_started_a_moment_ago_is_not_silent_yet() -> None:
    fresh = record(started_at_s=995.0, progress=Progress(updated_at_s=900.0))
    assert reason(fresh) == "the training rank to start"


def test_a_dead_generator_is_as_good_as_none() -> None:
    for generators in ([], [DEAD]):
        assert (reason(record(), surroundings(generators=generators)) or "").startswith("a generator: none")
    assert reason(record(), surroundings(generators=[DEAD, ALIVE])) == "scored groups"


def test_a_missing_rewarder_matters_once_something_waits_for_it() -> None:
    assert reason(record(), surroundings(num_rewarders=0)) == "scored groups"
    found = reason(record(), surroundings(num_rewarders=0, queues=Queues(completions=3)))
    assert found == "a rewarder: 3 groups wait to be scored and no rewarder is alive. Start one"


def test_a_run_asked_to_stop_says_so() -> None:
    assert reason(record(desired="stop")) == "its training rank to finish its step and stop"
