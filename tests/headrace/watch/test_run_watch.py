"""The state of a watched run, from records and events as the API sends them."""

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.event_stream import Event
from headrace.watch import watch_view
from headrace.watch.run_watch import RunWatch

pytestmark = pytest.mark.unit


def make_run(**changes: Any) -> dict[str, Any]:
    progress = {
        "step": 2,
        "max_steps": 10,
        "policy_version": 2,
        "groups_admitted": 30,
        "groups_trained": 16,
        "groups_dropped": {"zero_std": 3, "dead_letter": 1},
        "num_generators": 1,
        "pushes": 3,
        "pushes_confirmed": 3,
    }
    run = {
        "run_id": "run-a",
        "name": "tiny",
        "status": "running",
        "reason": "",
        "started_at_s": 1000.0,
        "ended_at_s": None,
        "run_dir": "/runs/run-a",
        "config": {"max_steps": 10},
        "waiting_for": "a generator: none is alive",
        "progress": progress,
    }
    return run | changes


def metrics(step: int, **values: float) -> Event:
    return Event(id=f"{step}-0", kind="metrics", data={"step": step, "at_s": 1000.0 + 2 * step, **values})


def drawn(watch: RunWatch, *, width: int = 90) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as picture:
        console.print(watch_view.panel(watch, now_s=1065.0, width=width))
    return picture.get()


def test_groups_in_flight_are_what_is_left_of_the_admitted() -> None:
    watch = RunWatch(make_run())
    assert watch.num_in_flight == 30 - 16 - 3 - 1
    assert "30 admitted = 16 trained + 4 dropped (zero_std 3, dead_letter 1) + 10 in flight" in drawn(watch, width=100)


def test_a_panel_can_be_drawn_in_any_width() -> None:
    watch = RunWatch(make_run())
    for step in (1, 2):
        watch.take_event(metrics(step, reward=0.1, **{"rewards/length/mean": 0.1, "rewards/length/failed_ratio": 0.0}))
    for width in range(1, 40):
        console = Console(width=width, file=io.StringIO())
        console.print(watch_view.panel(watch, now_s=1065.0, width=width, height=20))


def test_time_left_is_the_pace_of_the_steps_so_far_times_the_remaining_steps() -> None:
    watch = RunWatch(make_run())
    assert watch.seconds_left() is None
    for step in (1, 2, 3):
        watch.take_event(metrics(step, reward=0.1))
    assert watch.seconds_left() == (10 - 3) * 2.0
    assert "1:05 elapsed, about 0:14 left" in drawn(watch)


def test_a_night_without_services_is_in_no_pace() -> None:
    watch = RunWatch(make_run())
    for step, at_s in ((1, 0.0), (2, 2.0), (3, 4.0), (4, 64 * 3600.0), (5, 64 * 3600.0 + 2.0)):
        watch.take_event(metrics(step, at_s=at_s))
    assert watch.seconds_left() == (10 - 5) * 2.0


def test_a_clock_that_was_set_back_does_not_change_the_pace() -> None:
    watch = RunWatch(make_run())
    for step, at_s in ((1, 7200.0), (2, 3600.0)):
        watch.take_event(metrics(step, at_s=at_s))
    assert watch.seconds_left() is None
    for step, at_s in ((3, 3602.0), (4, 3604.0), (5, 3606.0)):
        watch.take_event(metrics(step, at_s=at_s))
    assert watch.seconds_left() == (10 - 5) * 2.0


def test_what_code_of_a_run_said_cannot_steer_the_terminal() -> None:
    said = "bad completion \x1b[2J"
    refused = [{"kind": "rewarder", "replica_id": "rewarder-0", "reason": said}]
    warned = [{"kind": "nothing_learned", "says": said}]
    watch = RunWatch(make_run(status="paused", reason=said, waiting_for=said, refusals=refused, warnings=warned))
    for shown in (watch.reason, watch.waiting_for, *watch.refusals, watch.warnings[0]["says"]):
        assert "\x1b" not in shown


def test_a_pause_is_in_no_pace_and_while_it_lasts_no_time_is_left() -> None:
    watch = RunWatch(make_run())
    for step, paused_s in ((1, 0.0), (2, 0.0), (3, 1.0)):
        watch.take_event(metrics(step, paused_s=paused_s))
    # Four seconds of wall-clock time, including a pause of one second.
    assert watch.seconds_left() == (10 - 3) * 1.5
    watch.take_run(make_run(status="paused", reason="a user asked for it"))
    assert watch.seconds_left() is None


def test_a_paused_run_says_why_and_since_when_and_when_it_went_on() -> None:
    progress = make_run()["progress"] | {"paused_s": 62.0}
    changes = {"reason": "reward function judge failed", "waiting_for": "it to work again", "progress": progress}
    watch = RunWatch(make_run(status="paused", **changes))
    picture = drawn(watch)
    for words in ("paused", "1:02 so far", "reward function judge failed", "for it to work again"):
        assert words in picture
    ended = drawn(RunWatch(make_run(status="finished", progress=progress)))
    assert "paused       1:02 " in ended
    assert "so far" not in ended
    line = watch_view.line(watch, now_s=1065.0)
    assert "paused  step 2/10" in line
    assert line.endswith("because reward function judge failed  waiting for it to work again")
    watch.take_event(Event(id="1-0", kind="status", data={"status": "paused", "by": "user", "reason": "asked"}))
    watch.take_event(Event(id="2-0", kind="status", data={"status": "running", "reason": "resumed"}))
    watch.take_event(Event(id="3-0", kind="status", data={"status": "finished"}))
    assert list(watch.messages) == ["paused: asked", "goes on: resumed"]


def test_a_step_made_again_after_a_crash_replaces_the_first_try_and_what_came_after_it() -> None:
    watch = RunWatch(make_run())
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        watch.take_event(metrics(step, reward=reward))
    assert watch.series("reward") == [0.1, 0.25]


def test_the_same_step_from_the_log_and_from_the_stream_counts_once() -> None:
    watch = RunWatch(make_run())
    for _ in range(2):
        for step in (1, 2):
            watch.take_event(metrics(step, reward=0.5))
    assert watch.series("reward") == [0.5, 0.5]


def test_a_metric_that_is_null_or_missing_is_left_out_and_does_not_break_the_picture() -> None:
    watch = RunWatch(make_run())
    watch.take_metrics({"step": 1, "reward": None, "loss": 0.5})
    watch.take_metrics({"reward": 1.0})
    watch.take_metrics({"step": 2, "reward": 0.75})
    assert watch.series("reward") == [0.75]
    assert "0.750" in drawn(watch)


def test_the_picture_says_what_the_run_is_waiting_for_until_it_has_ended() -> None:
    watch = RunWatch(make_run())
    assert "for a generator: none is alive" in drawn(watch)
    watch.take_run(make_run(status="failed", reason="the loss is not finite", ended_at_s=1010.0))
    assert "waiting" not in drawn(watch)
    assert "the loss is not finite" in drawn(watch)
    assert "0:10 elapsed" in drawn(watch)


def test_a_step_ends_a_wait_before_the_run_is_read_again() -> None:
    watch = RunWatch(make_run(waiting_for="a generator: generator-0 is loading the model"))
    watch.take_metrics({"step": 2, "reward": 0.5})
    watch.take_event(metrics(2, reward=0.5))
    assert "is loading the model" in watch.waiting_for, "these steps were made before the wait"
    watch.take_event(metrics(3, reward=0.5))
    assert watch.waiting_for == ""
    watch.take_run(make_run(waiting_for="a generator: none is alive"))
    assert watch.waiting_for == "a generator: none is alive"


def test_a_failed_push_and_a_log_message_are_shown() -> None:
    watch = RunWatch(make_run())
    watch.take_event(Event(id="1-0", kind="push", data={"failed": {"generator-0": "no answer"}}))
    watch.take_event(Event(id="2-0", kind="log", data={"message": "group 7 was buried"}))
    assert "push to generator-0 failed: no answer" in drawn(watch)
    assert "group 7 was buried" in drawn(watch)


def test_the_picture_fits_narrow_terminals() -> None:
    watch = RunWatch(make_run())
    for step in range(1, 9):
        watch.take_event(metrics(step, reward=step / 8, **{"push/total_s": 0.081, "push/standstill_s": 0.04}))
    for width in (60, 80, 200):
        lines = drawn(watch, width=width).splitlines()
        assert max(len(line) for line in lines) <= min(width, watch_view.MAX_WIDTH)
        assert "…" not in drawn(watch, width=width)
    assert "81 ms, including 40 ms standstill" in drawn(watch)


def test_one_line_says_the_same_for_logs() -> None:
    watch = RunWatch(make_run(waiting_for=None))
    watch.take_event(metrics(2, **{"reward": 0.5, "staleness/mean": 1.25, "throughput/generated_tokens_per_s": 6543.2}))
    assert (
        watch_view.line(watch, now_s=1065.0)
        == "[1:05] running  step 2/10  reward 0.500  staleness 1.25  generated 6,543 tokens/s"
    )


def test_a_run_that_continues_another_counts_its_steps_and_all_steps() -> None:
    beginning = {"run_id": "run-b", "run_name": None, "step": 60, "steps_before": 60, "says": "step 60 of run-b"}
    watch = RunWatch(make_run(waiting_for=None, beginning=beginning, config={"max_steps": 70}))
    assert watch_view.line(watch, now_s=1065.0) == "[1:05] running  step 2/10 (62/70 in all)"
    assert "step 2 of 10 (62 of 70 in all)" in drawn(watch)
    assert "began        from step 60 of run-b" in drawn(watch)


def test_a_new_number_of_steps_is_shown_before_the_training_rank_reports_it() -> None:
    assert RunWatch(make_run(config={"max_steps": 6})).progress_in_words == "step 2 of 6"
    of_epochs = make_run(config={"max_steps": -1})
    assert RunWatch(of_epochs).progress_in_words == "step 2 of 10"
    continued = make_run(config={"max_steps": 26}, beginning={"steps_before": 20})
    assert RunWatch(continued).progress_in_words == "step 2 of 6 (22 of 26 in all)"


@pytest.mark.parametrize(
    ("beginning", "origin"),
    [
        (None, ""),
        ({"run_id": "run-b", "run_name": "math", "step": 60, "said": "run-b"}, "math:60"),
        ({"run_id": "run-b", "run_name": None, "step": 60, "said": "run-b"}, "run-b:60"),
        ({"run_id": None, "run_name": None, "step": None, "said": "/models/small"}, "small"),
    ],
)
def test_the_origin_of_a_run_is_short(beginning: dict[str, Any] | None, origin: str) -> None:
    assert RunWatch(make_run(beginning=beginning)).origin == origin


def test_rates_are_left_out_while_there_is_no_generator() -> None:
    watch = RunWatch(make_run(waiting_for="a generator: generator-0 is starting", waiting_kind="generator"))
    watch.take_event(metrics(2, reward=0.5, **{"throughput/generated_tokens_per_s": 6543.2}))
    assert "reward 0.500" in watch_view.line(watch, now_s=1065.0)
    assert "tokens/s" not in watch_view.line(watch, now_s=1065.0)
    watch.take_run(make_run(waiting_for=None, waiting_kind=None))
    assert "generated 6,543 tokens/s" in watch_view.line(watch, now_s=1065.0)


def test_before_its_first_step_a_run_says_what_goes_on_instead_of_counting() -> None:
    for status, words in (("queued", "not started yet"), ("running", "starting"), ("failed", "no step was made")):
        watch = RunWatch(make_run(status=status, started_at_s=None, progress={}, waiting_for="its training rank"))
        assert words in drawn(watch)
        assert "?" not in drawn(watch)
        assert watch_view.line(watch, now_s=0.0).startswith(f"{status}  {words}")


def test_a_run_that_only_evaluates_says_what_the_evaluation_found() -> None:
    watch = RunWatch(make_run(started_at_s=None, config={"max_steps": 0}, progress={"max_steps": 0}, waiting_for=None))
    assert watch_view.line(watch, now_s=0.0) == "running  evaluating"
    watch.take_evaluation({"step": 0, "eval_reward": 0.25})
    watch.take_run(make_run(status="finished", started_at_s=None, config={"max_steps": 0}, progress={"max_steps": 0}))
    assert watch_view.line(watch, now_s=0.0) == "finished  evaluated  eval_reward 0.250"


def test_queues_are_what_is_in_the_streams_and_of_a_run_that_ended_only_what_was_buried() -> None:
    watch = RunWatch(make_run(queues={"prompts": 3, "completions": 1, "scored": 0, "settled": 8, "dead_letters": 0}))
    watch.take_event(metrics(2, **{"queue/prompts": 7.0, "queue/completions": 7.0, "queue/scored": 7.0}))
    assert "3 with generators, 1 with rewarders, 0 scored, 8 unsaved" in drawn(watch)
    watch.take_run(make_run(status="finished", queues={"prompts": 3, "completions": 0, "scored": 0, "dead_letters": 2}))
    assert "with generators" not in drawn(watch)
    assert "2 dead letters" in drawn(watch)
    watch.take_run(make_run(status="finished", queues={"prompts": 0, "completions": 0, "scored": 0, "dead_letters": 0}))
    assert "queues" not in drawn(watch)


def test_a_replica_that_cannot_serve_is_named_once() -> None:
    refusals = [
        {"kind": "generator", "replica_id": "generator-1", "reason": "no GPU here", "at_s": 1.0},
        {"kind": "rewarder", "replica_id": "node-3", "reason": "it ended", "at_s": 1.0},
    ]
    watch = RunWatch(make_run(waiting_for="a generator that can serve this run. no GPU here", refusals=refusals))
    assert watch.refusals == ["rewarder node-3 cannot serve it: it ended"]
    watch = RunWatch(make_run(waiting_for=None, refusals=refusals))
    assert "generator-1 cannot serve it: no GPU here" in drawn(watch)
    assert watch_view.line(watch, now_s=1065.0).endswith(
        "generator-1 cannot serve it: no GPU here  rewarder node-3 cannot serve it: it ended"
    )
    watch.take_run(make_run(status="failed", refusals=refusals))
    assert watch.refusals == []


def test_a_name_that_looks_like_markup_is_shown_as_it_is() -> None:
    watch = RunWatch(make_run(waiting_for="[red]that[/red]"))
    assert "for [red]that[/red]" in drawn(watch)


def test_time_is_written_as_clocks_are() -> None:
    assert [watch_view.clock(seconds) for seconds in (0, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]
