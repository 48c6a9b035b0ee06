"""Why a run is waiting, in one sentence: the one people look for when nothing moves.

It is made here, in one place, from what can be seen from outside; what only the training rank knows, it writes into its
progress itself. Whatever keeps a run from going on until somebody acts comes before what passes by itself.
"""

from services.trainer.run_api.run_view import Surroundings
from shared.run_store import TERMINAL, RunRecord

_MAX_SAID = 3
"""Refusals of replicas that are gone, the newest; where replicas get new names there is one a restart."""


def waiting_for(
    record: RunRecord, around: Surroundings, *, note: str, stale_after_s: float, now_s: float
) -> str | None:
    """Return what the run needs to go on, or None if it has ended or nothing is missing.

    Args:
        record: The run.
        around: What is around it.
        note: What the supervisor waits for on its behalf, if anything.
        stale_after_s: Age at which progress counts as not reported.
        now_s: Unix seconds.
    """
    if record.status in TERMINAL:
        return None
    if record.status == "queued":
        if record.desired == "pause":
            return "somebody to resume it: it was paused before it started"
        if around.current_run is not None and around.current_run != record.run_id:
            return f"run {around.current_run} to end: the generator fleet serves one run at a time"
        return "its training rank to be started"
    if note:
        return note
    silent_s = now_s - max(record.progress.updated_at_s, record.started_at_s or 0.0)
    if silent_s > stale_after_s:
        return _silent_rank(record, _more_than(silent_s, at_least_s=stale_after_s))
    if record.desired == "stop":
        return "its training rank to finish its step and stop"
    if record.pause is not None and record.pause.by == "user":
        return "its training rank to go on" if record.desired == "run" else "somebody to resume it"
    if record.desired == "pause":
        return "its training rank to finish its batch and pause"
    return _generator(around) or _rank_or_rewarder(record, around)


def _silent_rank(record: RunRecord, duration: str) -> str:
    log = f"{record.run_dir}/rank.log"
    if record.progress.starting:
        return f"its training rank, which has been {record.progress.starting} for {duration}; see {log}"
    return f"its training rank, which has not reported for {duration}; what it said last is in {log}"


def _generator(around: Surroundings) -> str:
    """Return which generator is missing and why, if none serves the run and waiting alone may not help."""
    if any(generator.serves for generator in around.generators):
        return ""
    living = [generator for generator in around.generators if generator.is_alive]
    said = {it.replica_id: it for it in around.refusals if it.kind == "generator"}
    if not living and said:
        last = "; ".join(f"{it.replica}: {it.reason}" for it in list(said.values())[-_MAX_SAID:])
        return f"a generator: none that is alive serves this run. What was said last: {last}"
    if not living:
        return (
            "a generator: none that is alive serves this run. Start one with the same Redis, or look at the log of "
            "the one that should be there"
        )
    if not all(generator.replica_id in said for generator in living):
        return ""
    each = "; ".join(f"{it.replica} is {it.doing}: {said[it.replica_id].reason}" for it in living)
    return f"a generator that can serve this run. {each}"


def _rank_or_rewarder(record: RunRecord, around: Surroundings) -> str | None:
    if record.progress.starting:
        return f"its training rank, which is {record.progress.starting}"
    if record.progress.updated_at_s < (record.started_at_s or 0.0):
        return "its training rank to start"
    living = [generator for generator in around.generators if generator.is_alive]
    if not any(generator.serves for generator in living):
        return f"a generator: {', '.join(f'{it.replica} is {it.doing}' for it in living)}"
    if around.num_rewarders == 0 and around.queues.completions:
        said = [it for it in around.refusals if it.kind == "rewarder"][-_MAX_SAID:]
        last = "; ".join(f"{it.replica}: {it.reason}" for it in said)
        return (
            f"a rewarder: {around.queues.completions} groups wait to be scored and no rewarder is alive. "
            f"{f'What was said last: {last}' if last else 'Start one'}"
        )
    return record.progress.waiting_for or None


def _more_than(seconds: float, *, at_least_s: float) -> str:
    """Return a duration that changes once a minute: whoever prints changes prints no clock."""
    minutes = int(seconds // 60)
    return f"more than {minutes} min" if minutes and minutes * 60 > at_least_s else f"more than {at_least_s:.0f} s"
