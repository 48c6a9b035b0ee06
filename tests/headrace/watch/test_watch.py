"""Following a run over real HTTP, without a terminal."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.client import HeadraceApiError, HeadraceClient
from headrace.watch.watch import final_sentence, follow
from tests.closed_directory import close_directory
from tests.headrace.scripted_api import Asked, event_stream, problem, serving

PROGRESS: dict[str, Any] = {"step": 2, "max_steps": 2, "groups_admitted": 4, "groups_trained": 4, "groups_dropped": {}}
RUN: dict[str, Any] = {
    "run_id": "run-a",
    "name": None,
    "status": "running",
    "run_dir": "/runs/run-a",
    "progress": PROGRESS,
}
ROWS = [{"step": 1, "at_s": 10.0, "reward": 0.25}, {"step": 2, "at_s": 12.0, "reward": 0.75}]


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def script_of(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Any:
    """Answer with one record after another; repeat the last one. The stream of events is open until the last record."""
    is_last = threading.Event()

    def script(asked: Asked) -> Any:
        if asked.path.endswith("/events"):
            is_last.wait(20)  # its reader asks for the record before it opens a stream: it should not take them all
            return event_stream(("1-0", "metrics", rows[0]))
        if asked.path.endswith("/metrics"):
            return {"metrics": rows, "next_cursor": None}
        if asked.path.endswith("/evaluations"):
            return {"evaluations": [{"step": 1, "eval_reward": 0.5}], "next_cursor": None}
        if len(runs) > 1:
            return runs.pop(0)
        is_last.set()
        return runs[0]

    return script


def test_a_run_is_followed_to_its_end_and_all_its_metrics_are_known() -> None:
    ended = RUN | {"status": "finished", "started_at_s": 8.0, "ended_at_s": 14.0}
    screen = console()
    with serving(script_of([RUN, RUN, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        watch = follow(client, "run-a", console=screen)
    assert watch.status == "finished"
    assert watch.series("reward") == [0.25, 0.75]
    assert watch.points("eval_reward") == [(1, 0.5)]
    assert printed(screen).splitlines()[-1] == "[0:06] finished  step 2/2  reward 0.750  eval_reward 0.500"
    assert final_sentence(watch.run) == (
        "run-a finished after 2 steps; the model is fetched with `headrace download run-a --to DIR`"
    )


def test_a_run_whose_events_cannot_be_read_is_followed_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._LINE_EVERY_S", 0.0)
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.05)
    rows, is_refused, is_followed, screen = ROWS[:1], threading.Event(), threading.Event(), console()

    def script(asked: Asked) -> Any:
        if asked.path.endswith("/events"):
            is_refused.set()
            return problem(403, "no events for this key")
        if asked.path.endswith("/metrics"):
            return {"metrics": ROWS if is_refused.is_set() else rows, "next_cursor": None}
        if asked.path.endswith("/evaluations"):
            return {"evaluations": [], "next_cursor": None}
        if "reward 0.750" in printed(screen):
            is_followed.set()
        return RUN | {"status": "finished"} if is_followed.is_set() or len(api.asked) > 100 else RUN

    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    assert is_followed.is_set()


def test_a_model_on_this_machine_is_named_by_its_path(tmp_path: Path) -> None:
    run = RUN | {"status": "finished", "run_dir": str(tmp_path)}
    assert final_sentence(run) == f"run-a finished after 2 steps; the model is in {tmp_path}/model"


def test_a_run_in_a_directory_that_this_user_may_not_look_into_counts_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    close_directory(monkeypatch, closed)
    finished = RUN | {"status": "finished", "run_dir": str(closed / "run-a")}
    assert final_sentence(finished).endswith("; the model is fetched with `headrace download run-a --to DIR`")
    assert final_sentence(finished | {"status": "failed"}).endswith(
        f"; checkpoints are in {closed}/run-a/checkpoints on the trainer's machine"
    )


def test_a_run_that_ended_early_says_why_and_whose_weights_its_model_has() -> None:
    best = {"step": 1, "metric": "eval_reward", "value": 0.75, "num_without_improvement": 1}
    ended = RUN | {"status": "finished", "started_at_s": 8.0, "ended_at_s": 14.0, "reason": "stopped early: it is flat"}
    ended |= {"progress": RUN["progress"] | {"best": best}, "config": {"load_best_model_at_end": True}}
    assert final_sentence(ended) == (
        "run-a finished after 2 steps: stopped early: it is flat; the model of step 1, eval_reward 0.75, is "
        "fetched with `headrace download run-a --to DIR`"
    )


def test_a_model_that_has_the_last_weights_instead_of_the_best_is_not_said_to_be_the_best() -> None:
    best = {"step": 1, "metric": "eval_reward", "value": 0.75, "num_without_improvement": 1}
    reason = "the model has the weights of the last step, 2, because the best checkpoint, of step 1, is damaged: x"
    ended = RUN | {"status": "finished", "started_at_s": 8.0, "ended_at_s": 14.0, "reason": reason}
    ended |= {"config": {"load_best_model_at_end": True}}
    for model_step, model in ((2, "the model"), (1, "the model of step 1, eval_reward 0.75,")):
        run = ended | {"progress": RUN["progress"] | {"best": best, "model_step": model_step}}
        assert final_sentence(run) == (
            f"run-a finished after 2 steps: {reason}; {model} is fetched with `headrace download run-a --to DIR`"
        )


def test_a_run_that_failed_says_why() -> None:
    failed = RUN | {"status": "failed", "reason": "the loss is not finite"}
    with serving(script_of([failed], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        watch = follow(client, "run-a", console=console())
    assert final_sentence(watch.run) == (
        "run-a failed after 2 steps: the loss is not finite; checkpoints are in /runs/run-a/checkpoints on the "
        "trainer's machine"
    )


def test_a_run_without_checkpoints_names_none(tmp_path: Path) -> None:
    failed = RUN | {"status": "failed", "reason": "no such model"}
    without_steps = failed | {"progress": RUN["progress"] | {"step": 0}}
    assert final_sentence(without_steps) == "run-a failed after 0 steps: no such model"
    here = failed | {"run_dir": str(tmp_path)}
    assert final_sentence(here) == "run-a failed after 2 steps: no such model"
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert final_sentence(here).endswith(f"; checkpoints are in {tmp_path}/checkpoints")


def test_a_run_in_which_nothing_moves_is_given_up_with_what_it_waits_for() -> None:
    waiting = RUN | {"waiting_for": "a generator: none is alive"}
    with (
        serving(script_of([waiting], ROWS)) as api,
        HeadraceClient(api.url, "k") as client,
        pytest.raises(HeadraceApiError, match=r"nothing was trained for 1 s; .* a generator: none is alive"),
    ):
        follow(client, "run-a", console=console(), stall_s=1.0)


def test_a_paused_run_is_not_given_up_however_long_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.05)
    paused = RUN | {"status": "paused", "reason": "somebody asked for it", "waiting_for": "a user to resume it"}
    ended = RUN | {"status": "stopped", "reason": ""}
    with serving(script_of([*[paused] * 8, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        watch = follow(client, "run-a", console=console(), stall_s=0.1)
    assert watch.status == "stopped"


def test_without_a_terminal_a_line_is_printed_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._LINE_EVERY_S", 0.05)
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.05)
    idle = RUN | {"started_at_s": 8.0, "waiting_for": "a generator: generator-0 is loading the model"}
    refused = idle | {"waiting_for": "a generator that can serve this run"}
    ended = RUN | {"status": "failed", "reason": "it gave up", "started_at_s": 8.0, "ended_at_s": 14.0}
    screen = console()
    with serving(script_of([*[idle] * 8, *[refused] * 8, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    said = [line.partition("] ")[2].partition("  waiting for ")[::2] for line in printed(screen).splitlines()]
    assert [(state.split()[0], wait) for state, wait in said] == [
        ("running", idle["waiting_for"]),
        ("running", refused["waiting_for"]),
        ("failed", ""),
    ]


def test_without_a_terminal_a_run_that_does_not_move_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._SAME_LINE_EVERY_S", 0.5)
    idle = RUN | {"waiting_for": "a generator: none is alive"}
    screen = console()
    with (
        serving(script_of([idle], ROWS)) as api,
        HeadraceClient(api.url, "k") as client,
        pytest.raises(HeadraceApiError),
    ):
        follow(client, "run-a", console=screen, stall_s=4.0)
    assert 2 <= len(printed(screen).splitlines()) <= 10


def test_without_a_terminal_a_warning_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._LINE_EVERY_S", 0.0)
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.0)
    runs = [RUN | {"warnings": [{"kind": "trainer_starves", "says": f"it waited {n}%"}]} for n in range(12)]
    screen = console()
    with serving(script_of([*runs, RUN | {"status": "finished"}], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    assert sum("warning: it waited" in line for line in printed(screen).splitlines()) == 1


def test_without_a_terminal_messages_are_printed_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._LAST_EVENTS_S", 120.0)
    says = "the trainer was started again and resumed at step 40; steps 41 to 47 are trained again"
    answers, is_told = script_of([RUN], ROWS), threading.Event()

    def script(asked: Asked) -> Any:
        if asked.path.endswith("/events"):
            is_told.set()
            failed = ("80000-0", "push", {"failed": {"generator-0": "it\nis \x1baway"}})
            return event_stream(("79500-0", "log", {"message": says}), failed, failed)
        if asked.path.endswith("/run-a"):
            return RUN | {"started_at_s": 8.0, "status": "stopped" if is_told.is_set() else "running"}
        return answers(asked)

    screen = console()
    with serving(script) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    lines = printed(screen).splitlines()
    assert f"[1:12] {says}" in lines
    assert lines.count(r"[1:12] push to generator-0 failed: it is \x1baway") == 1


def test_without_a_terminal_a_long_reason_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.watch.watch._LINE_EVERY_S", 0.0)
    monkeypatch.setattr("headrace.watch.watch._SAME_LINE_EVERY_S", 0.0)
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.0)
    says = "no group of the last {} groups had 2 scored completions: " + "the prompt is too long; " * 30
    paused = [RUN | {"status": "paused", "reason": says.format(16 + n)} for n in range(8)]
    other = RUN | {"status": "paused", "reason": "somebody asked for it, " * 30}
    screen = console()
    ended = RUN | {"status": "stopped", "reason": ""}
    with (
        serving(script_of([*paused, RUN, *paused, other, other, ended], ROWS)) as api,
        HeadraceClient(api.url, "k") as client,
    ):
        follow(client, "run-a", console=screen)
    lines = printed(screen).splitlines()
    assert sum(line.count("because no group of the last") for line in lines) > 3
    assert [len(line) > 400 for line in lines].count(True) == 2


def test_without_a_terminal_a_long_wait_is_printed_once_although_its_numbers_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.watch.watch._LINE_EVERY_S", 0.0)
    monkeypatch.setattr("headrace.watch.watch._POLL_EVERY_S", 0.0)
    says = (
        "reward function f to work again; " + "fix it, or resume or stop the run. " * 12 + "Meanwhile {} groups failed"
    )
    paused = [RUN | {"status": "paused", "reason": "f failed", "waiting_for": says.format(n)} for n in range(8)]
    screen = console()
    ended = RUN | {"status": "stopped", "reason": ""}
    with serving(script_of([*paused, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    lines = [line for line in printed(screen).splitlines() if "work again" in line]
    assert [len(line) > 400 for line in lines] == [True], "nothing that a line still shows has changed"


def test_an_unknown_run_is_refused_at_once() -> None:
    with (
        serving(lambda _: problem(404, "There is no run with this id.")) as api,
        HeadraceClient(api.url, "k") as client,
        pytest.raises(HeadraceApiError, match="no run with this id"),
    ):
        follow(client, "run-z", console=console())


@pytest.mark.parametrize(
    ("variables", "is_terminal"), [({"FORCE_COLOR": "1", "TERM": "xterm"}, None), ({"TERM": "dumb"}, True)]
)
def test_where_nothing_can_be_redrawn_lines_are_printed(
    variables: dict[str, str], is_terminal: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = RUN | {"status": "finished", "started_at_s": 8.0, "ended_at_s": 14.0}
    screen = Console(file=io.StringIO(), width=90, height=40, force_terminal=is_terminal)
    with serving(script_of([RUN, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    assert "finished" in printed(screen)
    assert "4 admitted = 4 trained + 0 dropped + 0 in flight" not in printed(screen)


def test_on_a_terminal_the_picture_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ended = RUN | {"status": "finished", "started_at_s": 8.0, "ended_at_s": 14.0}
    screen = Console(file=io.StringIO(), width=90, height=40, force_terminal=True)
    with serving(script_of([RUN, ended], ROWS)) as api, HeadraceClient(api.url, "k") as client:
        follow(client, "run-a", console=screen)
    assert "4 admitted = 4 trained + 0 dropped + 0 in flight" in printed(screen)
    assert "0.750" in printed(screen)
