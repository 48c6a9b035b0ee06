"""Explains in one sentence why a run is waiting, for users who see no progress.

The sentence is built only here, from the run's record and the state around it in Redis. For causes that only the
training rank knows, the rank writes a sentence and its kind into the run's progress. Causes that a person must remove
come before causes that pass by themselves.
"""

from services.trainer.run_api.run_view import Surroundings, is_agentic
from shared.redis.run_record import TERMINAL, RunRecord, Waiting
from shared.refusals import Kind

_MAX_SAID = 3
"""How many refusals of ended replicas to show: the newest. If replicas get new names, each restart adds one."""


def waiting_for(
    record: RunRecord, around: Surroundings, *, note: str, stale_after_s: float, now_s: float
) -> Waiting | None:
    """Return the reason why a run is waiting and its kind, or None if the run has ended or nothing is missing.

    Args:
        record: The run's record.
        around: The run's queues, replicas and refusals.
        note: The supervisor's sentence about a rank that it restarts, or empty.
        stale_after_s: Age in seconds at which progress counts as not reported.
        now_s: The present time in Unix seconds.
    """
    if record.status in TERMINAL:
        return None
    if record.status == "queued":
        if record.desired == "pause":
            when = "before it started" if record.started_at_s is None else "while it waited for its turn"
            return Waiting("user", f"a user to resume it: it was paused {when}")
        if around.current_run is not None and around.current_run != record.run_id:
            return Waiting("queue", f"run {around.current_run} to end: the generator fleet serves one run at a time")
        return Waiting("queue", "its training rank to be started")
    if note:
        return Waiting("restarting", note)
    silent_s = now_s - max(record.progress.updated_at_s, record.started_at_s or 0.0)
    if silent_s > stale_after_s:
        says = _silent_rank(record, _more_than(silent_s, at_least_s=stale_after_s))
        return Waiting("rank" if record.progress.starting else "silent_rank", says)  # a large model takes its time
    if record.progress.disk_full:
        return Waiting("disk", record.progress.disk_full)
    if record.desired == "stop":
        return Waiting("rank", "its training rank to finish its step and stop")
    if record.pause is not None and record.pause.by == "user":
        if record.desired == "run":
            return Waiting("rank", "its training rank to continue")
        return Waiting("user", "a user to resume it")
    if record.desired == "pause":
        return Waiting("rank", "its training rank to finish its batch and pause")
    if missing := _generator(around):
        return Waiting("generator", missing)
    return _rank_or_consumer(record, around)


def _silent_rank(record: RunRecord, duration: str) -> str:
    log = f"{record.run_dir}/rank.log"
    if record.progress.starting:
        return f"its training rank, which has been {record.progress.starting} for {duration}; see {log}"
    return f"its training rank, which has not reported for {duration}; its last messages are in {log}"


def _generator(around: Surroundings) -> str:
    """Return why the run lacks a generator; empty if a generator serves the run, or may do so without help."""
    if any(generator.serves for generator in around.generators):
        return ""
    living = [generator for generator in around.generators if generator.is_alive]
    said = {it.replica_id: it for it in around.refusals if it.kind == "generator"}
    last = "; ".join(f"{it.replica}: {it.reason}" for it in list(said.values())[-_MAX_SAID:])
    if not living and around.joining:
        return f"a generator: {', '.join(around.joining)}" + (f". Last messages: {last}" if last else "")
    if not living and said:
        return f"a generator: no live generator serves this run. Last messages: {last}"
    if not living:
        return (
            "a generator: no live generator serves this run. Start one with the same Redis, or look at the log of "
            "the generator that should be running"
        )
    if not all(generator.replica_id in said for generator in living):
        return ""
    each = "; ".join(f"{it.replica} is {it.doing}: {said[it.replica_id].reason}" for it in living)
    return f"a generator that can serve this run. {each}"


def _rank_or_consumer(record: RunRecord, around: Surroundings) -> Waiting | None:
    if record.progress.starting:
        return Waiting("rank", f"its training rank, which is {record.progress.starting}")
    if record.progress.updated_at_s < (record.started_at_s or 0.0):
        return Waiting("rank", "its training rank to start")
    living = [generator for generator in around.generators if generator.is_alive]
    if not any(generator.serves for generator in living):
        return Waiting("generator", f"a generator: {', '.join(f'{it.replica} is {it.doing}' for it in living)}")
    if is_agentic(record) and around.num_sessions == 0 and around.queues.prompts:
        do = "Start services/sessions, or look at its log if it should be running"
        return Waiting(
            "sessions",
            f"a sessions replica: {around.queues.prompts} groups wait to be played and no sessions replica plays this "
            f"run. {_last_messages(around, 'sessions') or do}",
        )
    if around.num_rewarders == 0 and around.queues.completions:
        return Waiting(
            "rewarder",
            f"a rewarder: {around.queues.completions} groups wait to be scored and no rewarder is alive. "
            f"{_last_messages(around, 'rewarder') or 'Start one'}",
        )
    if not record.progress.waiting_for:
        return None
    return Waiting(record.progress.waiting_kind, record.progress.waiting_for)


def _last_messages(around: Surroundings, kind: Kind) -> str:
    """Return the newest reasons why replicas of this kind cannot serve the run, as a sentence; empty without any."""
    said = [it for it in around.refusals if it.kind == kind][-_MAX_SAID:]
    return f"Last messages: {'; '.join(f'{it.replica}: {it.reason}' for it in said)}" if said else ""


def _more_than(seconds: float, *, at_least_s: float) -> str:
    """Return a duration that changes once a minute, so that clients which print changes do not print a clock."""
    minutes = int(seconds // 60)
    return f"more than {minutes} min" if minutes and minutes * 60 > at_least_s else f"more than {at_least_s:.0f} s"
