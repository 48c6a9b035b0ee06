"""Why a run is waiting, in one sentence made from its visible state."""

from typing import Any

import pytest

from services.trainer.run_api.run_surroundings import still_true
from services.trainer.run_api.run_view import GeneratorView, Queues, RefusalView, Surroundings, summary
from services.trainer.run_api.waiting import waiting_for
from shared.pause import Pause
from shared.redis.run_record import Progress, RunRecord, Waiting
from shared.refusals import Kind, Refusal

pytestmark = pytest.mark.unit

NOW_S = 1000.0
REFUSED = RefusalView(kind="generator", replica_id="generator-0", reason="no GPU here", at_s=990.0)
ALIVE = GeneratorView(replica_id="generator-0", url="http://127.0.0.1:1", is_alive=True)
SECOND = GeneratorView(replica_id="generator-2", url="http://127.0.0.1:3", is_alive=True)
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
    found = waiting(run, around, note=note)
    return found.says if found else None


def waiting(run: RunRecord, around: Surroundings | None = None, *, note: str = "") -> Waiting | None:
    return waiting_for(run, around or surroundings(), note=note, stale_after_s=30.0, now_s=NOW_S)


@pytest.mark.parametrize(
    ("run", "around", "note", "kind"),
    [
        ({"status": "queued", "desired": "pause"}, {}, "", "user"),
        ({"status": "queued"}, {"current_run": "run-b"}, "", "queue"),
        ({}, {"generators": []}, "its training rank, which crashed", "restarting"),
        ({"progress": Progress(updated_at_s=960.0)}, {}, "", "silent_rank"),
        ({"progress": Progress(starting="loading the model", updated_at_s=960.0)}, {}, "", "rank"),
        ({"desired": "stop"}, {}, "", "rank"),
        ({"progress": Progress(starting="loading the model", updated_at_s=999.0)}, {}, "", "rank"),
        ({}, {"generators": [DEAD]}, "", "generator"),
        ({}, {"num_rewarders": 0, "queues": Queues(completions=3)}, "", "rewarder"),
        ({"config": {"tools": ["tools:add"]}}, {"queues": Queues(prompts=3)}, "", "sessions"),
        (
            {"progress": Progress(waiting_for="a generator", waiting_kind="push_failed", updated_at_s=999.0)},
            {},
            "",
            "push_failed",
        ),
        ({}, {}, "", "work"),
    ],
)
def test_the_reason_for_waiting_has_a_kind_for_programs(
    run: dict[str, Any], around: dict[str, Any], note: str, kind: str
) -> None:
    found = waiting(record(**run), surroundings(**around), note=note)
    assert found is not None
    assert found.kind == kind


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


def test_the_note_of_the_supervisor_comes_first() -> None:
    assert reason(record(), surroundings(generators=[]), note="its training rank, which crashed") == (
        "its training rank, which crashed"
    )


def test_a_silent_rank_is_reported_with_its_log() -> None:
    silent = record(progress=Progress(waiting_for="scored groups", updated_at_s=969.0))
    assert reason(silent) == (
        "its training rank, which has not reported for more than 30 s; its last messages are in /runs/run-a/rank.log"
    )
    silent = record(progress=Progress(updated_at_s=850.0), started_at_s=800.0)
    assert "which has not reported for more than 2 min" in (reason(silent) or "")


def test_a_rank_that_takes_its_time_to_start_says_what_it_does() -> None:
    loading = Progress(starting="loading the model", updated_at_s=999.0)
    assert reason(record(progress=loading)) == "its training rank, which is loading the model"
    slow = record(progress=Progress(starting="loading the model", updated_at_s=960.0))
    assert reason(slow) == (
        "its training rank, which has been loading the model for more than 30 s; see /runs/run-a/rank.log"
    )


def test_a_rank_that_was_started_a_moment_ago_is_not_silent_yet() -> None:
    fresh = record(started_at_s=995.0, progress=Progress(updated_at_s=900.0))
    assert reason(fresh) == "its training rank to start"


def test_a_dead_generator_is_as_good_as_none() -> None:
    for generators in ([], [DEAD]):
        assert (reason(record(), surroundings(generators=generators)) or "").startswith(
            "a generator: no live generator"
        )
    assert reason(record(), surroundings(generators=[DEAD, ALIVE])) == "scored groups"


def test_a_generator_that_is_only_starting_is_not_reported_as_missing() -> None:
    around = surroundings(generators=[], joining=["generator-0 is starting"])
    assert reason(record(), around) == "a generator: generator-0 is starting"
    around = surroundings(generators=[], joining=["generator-0 is starting"], refusals=[REFUSED])
    assert reason(record(), around) == "a generator: generator-0 is starting. Last messages: generator-0: no GPU here"


def test_a_missing_rewarder_matters_once_something_waits_for_it() -> None:
    assert reason(record(), surroundings(num_rewarders=0)) == "scored groups"
    found = reason(record(), surroundings(num_rewarders=0, queues=Queues(completions=3)))
    assert found == "a rewarder: 3 groups wait to be scored and no rewarder is alive. Start one"
    refused = RefusalView(kind="rewarder", replica_id="node-3", reason="it ended, saying: no math-verify", at_s=990.0)
    found = reason(record(), surroundings(num_rewarders=0, queues=Queues(completions=3), refusals=[refused]))
    assert found == (
        "a rewarder: 3 groups wait to be scored and no rewarder is alive. Last messages: "
        "rewarder node-3: it ended, saying: no math-verify"
    )


def test_a_missing_sessions_replica_matters_to_a_run_with_tools_once_something_waits_for_it() -> None:
    around = surroundings(queues=Queues(prompts=3))
    with_tools = record(config={"tools": ["tools:add"]})
    assert reason(record(), around) == "scored groups"
    assert reason(with_tools, surroundings()) == "scored groups"
    assert reason(with_tools, surroundings(queues=Queues(prompts=3), num_sessions=1)) == "scored groups"
    assert reason(with_tools, around) == (
        "a sessions replica: 3 groups wait to be played and no sessions replica plays this run. Start "
        "services/sessions, or look at its log if it should be running"
    )
    refused = RefusalView(kind="sessions", replica_id="node-3", reason="no module named tools", at_s=990.0)
    assert reason(with_tools, surroundings(queues=Queues(prompts=3), refusals=[refused])) == (
        "a sessions replica: 3 groups wait to be played and no sessions replica plays this run. Last messages: "
        "sessions node-3: no module named tools"
    )


def test_a_generator_that_loads_is_named() -> None:
    loading = ALIVE.model_copy(update={"doing": "loading the model"})
    assert reason(record(), surroundings(generators=[loading])) == "a generator: generator-0 is loading the model"
    assert reason(record(), surroundings(generators=[loading, SECOND])) == "scored groups"


def test_generators_that_cannot_serve_the_run_are_named_with_what_they_say() -> None:
    unable = ALIVE.model_copy(update={"doing": "unable to serve this run"})
    around = surroundings(generators=[unable], refusals=[REFUSED])
    assert reason(record(), around) == (
        "a generator that can serve this run. generator-0 is unable to serve this run: no GPU here"
    )
    starting = record(progress=Progress(starting="loading the model", updated_at_s=999.0))
    assert "no GPU here" in (reason(starting, around) or ""), "the rank will come, the generator will not"
    assert reason(record(), surroundings(generators=[unable, SECOND], refusals=[REFUSED])) == "scored groups"


def test_of_generators_that_are_gone_the_last_words_are_told() -> None:
    assert reason(record(), surroundings(generators=[], refusals=[REFUSED])) == (
        "a generator: no live generator serves this run. Last messages: generator-0: no GPU here"
    )


def test_a_refusal_is_shown_until_others_have_long_taken_the_place_of_the_replica() -> None:
    old, new = Refusal("generator", "a", "old", NOW_S - 700), Refusal("generator", "b", "new", NOW_S - 5)

    def shown(*, living: set[str], is_served: bool) -> list[str]:
        served_by: dict[Kind, bool] = {"generator": is_served, "rewarder": True}
        return [it.reason for it in still_true([old, new], living=living, served_by=served_by, now_s=NOW_S)]

    assert shown(living=set(), is_served=False) == ["old", "new"]
    assert shown(living=set(), is_served=True) == ["new"]
    assert shown(living={"a"}, is_served=True) == ["old", "new"]


def test_a_paused_run_names_the_user_or_rank_that_it_waits_for() -> None:
    by_user, by_rewards = (Pause(by, "a reason", 990.0) for by in ("user", "rewards"))
    assert reason(record(desired="pause")) == "its training rank to finish its batch and pause"
    held = record(status="paused", desired="pause", pause=by_user)
    assert reason(held) == reason(held, surroundings(generators=[])) == "a user to resume it"
    assert reason(record(status="paused", pause=by_user)) == "its training rank to continue"
    failing = record(status="paused", pause=by_rewards)
    assert reason(failing) == "scored groups", "its rank reports the function that is tried, and how often"
    assert (reason(failing, surroundings(generators=[])) or "").startswith("a generator: no live generator"), (
        "nothing tries it"
    )
    queued = record(status="queued", desired="pause", started_at_s=None, progress=Progress())
    assert reason(queued) == "a user to resume it: it was paused before it started"
    resumed = record(status="queued", desired="pause")
    assert reason(resumed) == "a user to resume it: it was paused while it waited for its turn"
    silent = record(status="paused", pause=by_rewards, progress=Progress(updated_at_s=900.0))
    assert "has not reported" in (reason(silent) or "")


def test_a_stop_request_is_shown() -> None:
    assert reason(record(desired="stop")) == "its training rank to finish its step and stop"


def test_the_kind_is_shown_once() -> None:
    assert "waiting_kind" not in summary(record()).progress
