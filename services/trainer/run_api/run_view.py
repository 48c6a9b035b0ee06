"""A run as the API shows it: the record, how full its streams are, who serves it, and *why it is waiting*.

The sentence in ``waiting_for`` is the one people look for when nothing moves. It is made here, in one place, from what
can be seen from outside; what only the training rank knows, it writes into its progress itself.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from shared.keys import GENERATORS, REWARDERS, RunKeys
from shared.lease import alive
from shared.redis_connection import Redis, patiently
from shared.run_store import TERMINAL, RunRecord

_PATIENCE_S = 10.0


class RunSummary(BaseModel):
    """One run in a list. Times are Unix seconds."""

    run_id: str
    name: str | None
    status: str = Field(description="queued, running, finished, stopped or failed")
    desired: str = Field(description="run, or stop once somebody asked for it")
    reason: str = Field(description="Why it ended as it did")
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    run_dir: str = Field(description="Directory of checkpoints, metrics, rollouts and rank.log")
    progress: dict[str, Any] = Field(description="Counts of the surviving lineage, about a second old")


class GeneratorView(BaseModel):
    """A generator replica that has joined the run."""

    replica_id: str
    url: str
    is_alive: bool


class Queues(BaseModel):
    """Prompt groups waiting or being worked on, by what they wait for."""

    prompts: int = 0
    completions: int = 0
    scored: int = 0
    dead_letters: int = 0


class RunDetail(RunSummary):
    """All there is to say about one run."""

    waiting_for: str | None = Field(description="What the run needs to go on, in words; null when nothing is missing")
    queues: Queues
    generators: list[GeneratorView]
    num_rewarders: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What is around a run, as seen in Redis a moment ago."""

    current_run: str | None
    queues: Queues
    generators: list[GeneratorView]
    num_rewarders: int


def summary(record: RunRecord) -> RunSummary:
    """Return the run for a list."""
    return RunSummary(
        run_id=record.run_id,
        name=record.config.get("name"),
        status=record.status,
        desired=record.desired,
        reason=record.reason,
        created_at_s=record.created_at_s,
        started_at_s=record.started_at_s,
        ended_at_s=record.ended_at_s,
        run_dir=record.run_dir,
        progress=msgspec.to_builtins(record.progress),
    )


def detail(record: RunRecord, around: Surroundings, *, note: str, stale_after_s: float) -> RunDetail:
    """Return the run with everything around it."""
    return RunDetail(
        **summary(record).model_dump(),
        waiting_for=waiting_for(record, around, note=note, stale_after_s=stale_after_s, now_s=time.time()),
        queues=around.queues,
        generators=around.generators,
        num_rewarders=around.num_rewarders,
        config=record.config,
    )


async def look_around(redis: Redis, record: RunRecord, *, current_run: str | None) -> Surroundings:
    """Return what is around the run."""
    keys = RunKeys(record.run_id)

    async def read() -> list[Any]:
        async with redis.pipeline(transaction=False) as pipe:
            for stream in (keys.prompts, keys.completions, keys.scored, keys.dead):
                pipe.xlen(stream)
            pipe.hgetall(keys.generators)
            found: list[Any] = await pipe.execute()
            return found

    prompts, completions, scored, dead, replicas = await patiently(
        read, what=f"looking at run {record.run_id}", timeout_s=_PATIENCE_S
    )
    living = await alive(redis, leases=keys.leases(GENERATORS))
    generators = [
        GeneratorView(replica_id=name.decode(), url=_url(address), is_alive=name.decode() in living)
        for name, address in sorted(replicas.items())
    ]
    return Surroundings(
        current_run=current_run,
        queues=Queues(prompts=prompts, completions=completions, scored=scored, dead_letters=dead),
        generators=generators,
        num_rewarders=len(await alive(redis, leases=keys.leases(REWARDERS))),
    )


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
        if around.current_run is not None and around.current_run != record.run_id:
            return f"run {around.current_run} to end: the generator fleet serves one run at a time"
        return "its training rank to be started"
    if note:
        return note
    reported_at_s = max(record.progress.updated_at_s, record.started_at_s or 0.0)
    silent_s = now_s - reported_at_s
    if silent_s > stale_after_s:
        return (
            f"its training rank, which has not reported for {silent_s:.0f} s; what it said last is in "
            f"{record.run_dir}/rank.log"
        )
    if record.desired == "stop":
        return "its training rank to finish its step and stop"
    if not any(generator.is_alive for generator in around.generators):
        return (
            "a generator: none that is alive serves this run. Start one with the same Redis, or look at the log of "
            "the one that should be there"
        )
    if around.num_rewarders == 0 and around.queues.completions:
        return f"a rewarder: {around.queues.completions} groups wait to be scored and no rewarder is alive. Start one"
    return record.progress.waiting_for or None


def _url(address: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(address)
        return str(found["url"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
