"""Finds the one run that a request's path names by its id, its name, or the beginning of its id.

    1  an id              that run
    2  else a name        the run of that name. If several have it, a request that only reads gets the run that has not
                          ended, if there is exactly one; otherwise the request is refused
    3  else the beginning of exactly one id, of at least 8 characters (`run-` and 4 more)

All routes with ``{run_id}`` use it, and so do all commands. A request that changes a run never chooses between runs,
because the intended run may have ended a moment ago. A refusal is a 409 with the runs that fit. Every answer has the
full id.

An id costs one read. For a name, at most 101 records are read, so a name of more than 100 runs is always ambiguous.
"""

from typing import Annotated

from fastapi import Depends, Path
from pydantic import BaseModel

from services.trainer.problems import Problem, no_such_run
from services.trainer.run_api.run_lookup import MAX_READ, MAX_SHOWN, fitting, is_reference
from services.trainer.run_api.trainer_api import Api
from shared.redis.run_record import TERMINAL, RunRecord
from shared.service.current_request import name_subject

_MEANING = (
    "The run's id, or its name, or the beginning of its id (at least 8 characters). A request that changes a run needs "
    "a name that no other run has. To other requests, a name that several runs have means the run that has not ended"
)
_Reference = Annotated[str, Path(alias="run_id", description=_MEANING)]


class Candidate(BaseModel):
    """One of the runs that an ambiguous reference matches."""

    run_id: str
    name: str | None
    status: str
    created_at_s: float
    started_at_s: float | None


async def _run_to_read(reference: _Reference, api: Api) -> RunRecord:
    found = await fitting(api.store, reference)
    not_ended = [record for record in found if record.status not in TERMINAL]
    is_name = len(found) <= MAX_READ and all(record.name == reference for record in found)
    return only(not_ended if is_name and len(not_ended) == 1 else found, reference)


async def _run_to_change(reference: _Reference, api: Api) -> RunRecord:
    record = only(await fitting(api.store, reference), reference)
    name_subject(record.run_id)
    return record


RunToRead = Annotated[RunRecord, Depends(_run_to_read)]
RunToChange = Annotated[RunRecord, Depends(_run_to_change)]


def only(found: list[RunRecord], reference: str) -> RunRecord:
    """Return the only run in ``found``. Raise a Problem: 404 without any, 409 with several."""
    if not found:
        raise no_such_run(reference if is_reference(reference) else "")
    if len(found) == 1:
        return found[0]
    shown = [
        Candidate(
            run_id=record.run_id,
            name=record.name,
            status=record.status,
            created_at_s=record.created_at_s,
            started_at_s=record.started_at_s,
        )
        for record in found[:MAX_SHOWN]
    ]
    how_many = f"More than {MAX_SHOWN} runs" if len(found) > MAX_SHOWN else f"{len(found)} runs"
    what = "have this name" if found[0].name == reference else "have an id that begins like this"
    told = ", ".join(f"{one.run_id} ({one.name or 'no name'}, {one.status})" for one in shown)
    raise Problem(
        409,
        "Ambiguous run",
        f"{how_many} {what}. Use the id of one: {told}{', ...' if len(found) > MAX_SHOWN else ''}.",
        run_id=reference,
        candidates=[one.model_dump() for one in shown],
    )


def is_run_id(text: str) -> bool:
    """Whether ``text`` has the form of a run id. The run may not exist."""
    return is_reference(text) and "." not in text
