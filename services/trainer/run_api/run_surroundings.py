"""Reads the state around a run from Redis: its queues, its live replicas, and the replicas that cannot serve it.

streams, leases, registrations, refusals --look_around--> Surroundings
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.trainer.run_api.run_view import GeneratorView, Queues, RefusalView, Surroundings, replica_name
from shared.redis.keys import FLEET, FLEET_LEASES, GENERATORS, REFUSALS, REWARDERS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis, patiently
from shared.redis.run_record import TERMINAL, Progress, RunRecord
from shared.refusals import Kind, Refusal, decode_refusals
from shared.registration import decode_registration

_PATIENCE_S = 10.0
_RECENT_S = 600.0
"""Time in seconds for which the last message of an ended replica is shown even if others serve the run."""


async def look_around(redis: Redis, record: RunRecord, *, current_run: str | None) -> Surroundings:
    """Read from Redis a run's queues, its replicas, and the reasons why replicas refuse to serve it."""
    keys = RunKeys(record.run_id)

    async def read() -> list[Any]:
        async with redis.pipeline(transaction=False) as pipe:
            for stream in (keys.prompts, keys.completions, keys.scored, keys.dead):
                pipe.xlen(stream)
            for replicas in (keys.generators, keys.refusals, REFUSALS):
                pipe.hgetall(replicas)
            found: list[Any] = await pipe.execute()
            return found

    prompts, completions, scored, dead, replicas, refused_it, refused_all = await patiently(
        read, what=f"looking at run {record.run_id}", timeout_s=_PATIENCE_S
    )
    num_waiting = min(scored, record.progress.groups_scored)
    living = await alive(redis, leases=keys.leases(GENERATORS))
    generators = [
        _generator(name.decode(), address, is_alive=name.decode() in living)
        for name, address in sorted(replicas.items())
    ]
    sessions = living - {name.decode() for name in replicas}
    rewarders = await alive(redis, leases=keys.leases(REWARDERS))
    refused = [] if record.status in TERMINAL else decode_refusals(refused_all, refused_it) + left_out(record.progress)
    return Surroundings(
        current_run=current_run,
        queues=Queues(
            prompts=prompts,
            completions=completions,
            scored=num_waiting,
            settled=scored - num_waiting,
            dead_letters=dead,
        ),
        generators=generators,
        joining=[] if any(it.is_alive for it in generators) else await _joining(redis),
        num_rewarders=len(rewarders),
        num_sessions=len(sessions),
        refusals=still_true(
            refused,
            living=living | rewarders,
            served_by={
                "generator": any(generator.serves for generator in generators),
                "rewarder": bool(rewarders),
                "sessions": bool(sessions),
            },
            now_s=time.time(),
        ),
    )


async def _joining(redis: Redis) -> list[str]:
    """Return a sentence about the activity of each live generator in the deployment, whichever run it serves."""
    living = await alive(redis, leases=FLEET_LEASES)
    entries: dict[bytes, bytes] = await patiently(
        lambda: redis.hgetall(FLEET), what="reading the generators", timeout_s=_PATIENCE_S
    )
    named = sorted((name.decode(), decode_registration(entry).doing) for name, entry in entries.items())
    return [
        f"{replica_name('generator', name)} is {doing or 'about to join'}" for name, doing in named if name in living
    ]


def left_out(progress: Progress) -> list[Refusal]:
    """Return a refusal (a replica and why it cannot serve) for each replica that did not get the newest weights."""
    return [
        Refusal("generator", replica_id, f"the last push left it out: {reason}", progress.updated_at_s)
        for replica_id, reason in progress.left_out.items()
    ]


def still_true(
    refused: Sequence[Refusal], *, living: Collection[str], served_by: Mapping[Kind, bool], now_s: float
) -> list[RefusalView]:
    """Return the refusals to show, without refusals of replicas that are long gone and have been replaced.

    Args:
        refused: All refusals that concern the run.
        living: Replicas whose lease is alive.
        served_by: Whether any replica of a kind serves the run.
        now_s: The present time in Unix seconds.
    """
    return [
        RefusalView(kind=it.kind, replica_id=it.replica_id, reason=it.reason, at_s=it.at_s)
        for it in refused
        if it.replica_id in living or not served_by[it.kind] or now_s - it.at_s < _RECENT_S
    ]


def _generator(replica_id: str, entry: bytes, *, is_alive: bool) -> GeneratorView:
    said = decode_registration(entry)
    return GeneratorView(replica_id=replica_id, url=said.url, is_alive=is_alive, doing=said.doing)
