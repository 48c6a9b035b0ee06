"""Follows a run on the terminal until it ends or the user presses Ctrl-C.

    events (a thread, reconnecting) --> queue --> |      |
    GET run, once a second ---------------------> | draw | --> panel, or lines without a terminal

Ctrl-C ends only the watching; the run goes on.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.live import Live

from headrace.client import HeadraceApiError, HeadraceClient, Run
from headrace.event_stream import Event
from headrace.watch import watch_view
from headrace.watch.run_directory import RunReader
from headrace.watch.run_watch import RunWatch, messages_in

_POLL_EVERY_S = 1.0
_DRAW_EVERY_S = 0.25
_LINE_EVERY_S = 5.0
_SAME_LINE_EVERY_S = 60.0
_PATIENCE_S = 60.0
_LAST_EVENTS_S = 2.0
_MAX_NEW_MESSAGES = 10


def follow(
    client: HeadraceClient,
    run_id: str,
    *,
    console: Console,
    stall_s: float | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_run: Callable[[Run], None] | None = None,
) -> RunWatch:
    """Show the run until it has ended, and return its last state.

    Args:
        client: A client of the run API.
        run_id: The run's id.
        console: Where to draw.
        stall_s: Give up if no step was trained for this many seconds while the run is not paused; None for no limit.
        on_event: Called with every event, in this thread.
        on_run: Called about once a second with the run, in this thread.

    Raises:
        HeadraceApiError: The run API was unreachable for a minute, or the run does not exist or has stalled.
    """
    watch = RunWatch(client.get(run_id))
    take_all(watch, client)
    events: queue.Queue[Event | None] = queue.Queue()
    stop = threading.Event()
    threading.Thread(
        target=_receive, args=(client.another(), run_id, events, stop), name=f"events of {run_id}", daemon=True
    ).start()
    follower = _Follower(client, watch, events, stall_s=stall_s, on_event=on_event, on_run=on_run)
    try:
        if _redraws(console):
            _draw(follower, console)
        else:
            _print_lines(follower, console)
    finally:
        stop.set()
    return watch


class _Follower:
    """Keeps a RunWatch (the state of a watched run) up to date from the event stream and by polling the run API."""

    def __init__(
        self,
        client: HeadraceClient,
        watch: RunWatch,
        events: "queue.Queue[Event | None]",
        *,
        stall_s: float | None,
        on_event: Callable[[Event], None] | None,
        on_run: Callable[[Run], None] | None,
    ) -> None:
        self.watch = watch
        self._client = client
        self._events = events
        self._stall_s = stall_s
        self._on_event = on_event
        self._on_run = on_run
        self._has_all_events = False
        self._new_messages: deque[tuple[float | None, str]] = deque(maxlen=_MAX_NEW_MESSAGES)
        self._poll_at = self._take_all_at = 0.0
        self._moved_at = time.monotonic()
        self._failing_since: float | None = None
        self._seen_step = -1

    def update(self, *, wait_s: float) -> None:
        """Take all events that have arrived, waiting at most ``wait_s`` for the first; poll the run once a second.

        If the run has ended, wait briefly for its last events.
        """
        self._take_events(wait_s)
        if time.monotonic() >= self._poll_at:
            self._poll()
            self._poll_at = time.monotonic() + _POLL_EVERY_S
        self._notice_stall()
        give_up_at = time.monotonic() + _LAST_EVENTS_S
        while self.watch.has_ended and not self._has_all_events and (left_s := give_up_at - time.monotonic()) > 0:
            self._take_events(left_s)

    def take_messages(self) -> list[tuple[float | None, str]]:
        """Return the newest messages since the last call, each with its time in Unix seconds (None: unknown)."""
        taken = [*self._new_messages]
        self._new_messages.clear()
        return taken

    def _take_events(self, wait_s: float) -> None:
        try:
            event = self._events.get(timeout=wait_s)
            while event is not None:
                self._take(event)
                event = self._events.get_nowait()
            self._has_all_events = True
        except queue.Empty:
            pass

    def _take(self, event: Event) -> None:
        self.watch.take_event(event)
        self._new_messages += [(event.at_s, message) for message in messages_in(event)]
        if self._on_event is not None:
            self._on_event(event)

    def _poll(self) -> None:
        try:
            run = self._client.get(self.watch.run_id)
            self.watch.take_run(run)
            if self._on_run is not None:
                self._on_run(run)
            if self.watch.has_ended or (self._has_all_events and time.monotonic() >= self._take_all_at):
                # Events may have been lost; the files have all metrics and evaluations.
                take_all(self.watch, self._client)
                self._take_all_at = time.monotonic() + _LINE_EVERY_S
            self._failing_since = None
        except HeadraceApiError as error:
            self._failing_since = time.monotonic() if self._failing_since is None else self._failing_since
            if not error.may_pass or time.monotonic() - self._failing_since > _PATIENCE_S:
                raise

    def _notice_stall(self) -> None:
        now = time.monotonic()
        if self.watch.step != self._seen_step or self.watch.is_paused:
            self._seen_step, self._moved_at = self.watch.step, now
        if self._stall_s is not None and now - self._moved_at > self._stall_s and not self.watch.has_ended:
            raise HeadraceApiError(
                f"nothing was trained for {self._stall_s:.0f} s; the run is waiting for "
                f"{self.watch.waiting_for or 'an unknown reason'}"
            )


def take_all(watch: RunWatch, runs: RunReader) -> None:
    """Read all metrics and evaluations of a run, and store them in ``watch``."""
    for metrics in runs.metrics(watch.run_id):
        watch.take_metrics(metrics)
    for evaluation in runs.evaluations(watch.run_id):
        watch.take_evaluation(evaluation)


def _redraws(console: Console) -> bool:
    """Return whether rich can redraw its output there: in a notebook with ipywidgets, or on a capable terminal.

    FORCE_COLOR and TTY_COMPATIBLE make rich take files and pipes for terminals, as the logs of a CI are.
    """
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    is_forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE")) and not console.file.isatty()
    return console.is_interactive and not is_forced


def _draw(follower: _Follower, console: Console) -> None:
    def picture() -> object:
        return watch_view.panel(follower.watch, now_s=time.time(), width=console.width, height=console.height)

    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        while True:
            follower.update(wait_s=_DRAW_EVERY_S)
            live.update(picture(), refresh=True)  # type: ignore[arg-type]
            if follower.watch.has_ended:
                return


def _print_lines(follower: _Follower, console: Console) -> None:
    """Follow the run without a terminal: print its state every few seconds if it has changed, else once a minute.

    A long reason for a wait or pause is printed in full only once. The run's messages are printed as they arrive, at
    most the newest 10 at a time. Each kind of warning is printed once.
    """

    def print_line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    shown, shown_at, warned, said, last = "", -_SAME_LINE_EVERY_S, set[str](), set[str](), ""
    while True:
        follower.update(wait_s=_DRAW_EVERY_S)
        watch, now = follower.watch, time.monotonic()
        for at_s, message in follower.take_messages():
            if message != last:  # such as a push that fails again and again for one reason
                print_line(watch_view.message_line(watch, message, at_s=at_s))
            last = message
        state = watch_view.state(watch, said=said)
        if watch.has_ended or now - shown_at >= (_SAME_LINE_EVERY_S if state == shown else _LINE_EVERY_S):
            line = watch_view.line(watch, now_s=time.time(), said=said)
            said |= watch_view.reasons(watch)
            print_line(line)
            shown, shown_at = watch_view.state(watch, said=said), now
            for warning in watch.warnings:  # once a kind: the numbers in it change all the time
                if warning["kind"] not in warned:
                    warned.add(warning["kind"])
                    print_line(f"warning: {warning['says']}")
        if watch.has_ended:
            return


def _receive(client: HeadraceClient, run_id: str, events: "queue.Queue[Event | None]", stop: threading.Event) -> None:
    """Read the run's events in a thread of their own. Put them into the queue, and None at their end.

    If the stream fails for good, polling still shows the run and its metrics.
    """
    with client:
        try:
            for event in client.events(run_id, stop=stop):
                events.put(event)
        except HeadraceApiError as error:
            events.put(Event(id="", kind="log", data={"message": f"no more events: {error}"}))
        finally:
            events.put(None)


def final_sentence(run: Run) -> str:
    """Return a sentence that says how the run ended and where its model or checkpoints are."""
    steps, is_here = RunWatch(run).step, os.path.isdir(run["run_dir"])
    if run["status"] == "finished":
        watch = RunWatch(run)
        best = watch.best
        chosen = f" of {best}," if watch.is_best_model else ""
        early = f": {best_reason}" if best and (best_reason := str(run.get("reason") or "")) else ""
        fetched = f"is fetched with `headrace download {run['run_id']} --to DIR`"
        where = f"is in {run['run_dir']}/model" if is_here else fetched
        return f"{run['run_id']} finished after {steps} steps{early}; the model{chosen} {where}"
    reason = f": {run['reason']}" if run.get("reason") else ""
    says = f"{run['run_id']} {run['status']} after {steps} steps{reason}"
    if not _may_have_checkpoints(run, steps):
        return says
    elsewhere = "" if is_here else " on the trainer's machine"
    return f"{says}; checkpoints are in {run['run_dir']}/checkpoints{elsewhere}"


def _may_have_checkpoints(run: Run, steps: int) -> bool:
    """Return whether a run may have written checkpoints. If its directory is elsewhere, only its steps are known."""
    directory = Path(run["run_dir"])
    return steps > 0 and (not os.path.isdir(directory) or any((directory / "checkpoints").glob("step_*")))
