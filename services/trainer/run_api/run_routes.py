"""Routes that list, show, pause, resume, stop and delete runs."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from services.trainer.checkpoints.manifest import MANIFEST_FILE
from services.trainer.problems import Problem, documented, no_such_run
from services.trainer.run_api.listing.run_listing import Position, Wanted, find_runs
from services.trainer.run_api.listing.run_sorting import Place, Sort, sorted_runs
from services.trainer.run_api.run_reference import RunToChange, RunToRead, is_run_id
from services.trainer.run_api.run_surroundings import look_around
from services.trainer.run_api.run_view import (
    ListedRun,
    RunDetail,
    Surroundings,
    detail,
    summary,
)
from services.trainer.run_api.submit_route import refuse_if_queue_is_full
from services.trainer.run_api.trainer_api import Api, TrainerApi
from services.trainer.run_api.waiting import waiting_for
from services.trainer.run_files import RunFiles
from services.trainer.telemetry.run_warnings import read_warnings
from shared.redis.run_record import TERMINAL, RunRecord, Status
from shared.run_options.labels import MAX_TAGS
from shared.serving.page_cursor import MAX_CURSOR, MEANING, NEXT_MEANING, bad_cursor, decode_cursor, encode_cursor
from shared.serving.query_number import WHOLE

router = APIRouter(prefix="/v1/runs", tags=["runs"])


class RunList(BaseModel):
    """A page of runs, newest first or in the order of ``sort``."""

    runs: list[ListedRun]
    next_cursor: str | None = Field(description=NEXT_MEANING)


@router.get("", response_model=RunList, responses=documented(400, 422))
async def list_runs(
    api: Api,
    status: Annotated[list[Status] | None, Query(description="Only runs with one of these statuses")] = None,
    name: Annotated[str | None, Query(max_length=64, description="Only runs with this name")] = None,
    tag: Annotated[list[str] | None, Query(max_length=MAX_TAGS, description="Only runs with all of these tags")] = None,
    sort: Annotated[
        Sort, Query(description="Order: latest or most steps first; names and statuses A to Z")
    ] = "created",
    limit: Annotated[int, Query(ge=1, le=1000), WHOLE] = 100,
    cursor: Annotated[str | None, Query(max_length=MAX_CURSOR, description=MEANING)] = None,
) -> RunList:
    """List runs, newest first or in the order of ``sort``."""
    next_position: tuple[Any, ...] | None
    wanted = Wanted(statuses=frozenset(status or ()), name=name, tags=frozenset(tag or ()))
    if sort == "created":
        before = None if cursor is None else _position(cursor)
        newest = await find_runs(api.store, wanted, limit=limit, before=before)
        records, next_position = newest.records, newest.next_before
    else:
        after = None if cursor is None else _place(cursor, sort)
        found = await sorted_runs(api.store, wanted, sort=sort, limit=limit, after=after)
        records, next_position = found.records, found.next_after and (sort, *found.next_after)
    current_run = await api.store.current_run()
    return RunList(
        runs=[await _listed(api, record, current_run) for record in records],
        next_cursor=None if next_position is None else encode_cursor(next_position),
    )


@router.get("/{run_id}", response_model=RunDetail, responses=documented(404, 409))
async def get_run(run: RunToRead, api: Api) -> RunDetail:
    """Show one run: its progress, and why it is waiting."""
    return await _detail(api, run)


@router.post("/{run_id}/stop", status_code=202, response_model=RunDetail, responses=documented(404, 409))
async def stop_run(run: RunToChange, api: Api) -> RunDetail:
    """Ask a run to stop after its current batch, with a checkpoint and a final model. Repeating it has no effect."""
    await api.supervisor.stop_run(run.run_id)
    return await after_change(api, run.run_id)


@router.post("/{run_id}/pause", status_code=202, response_model=RunDetail, responses=documented(404, 409))
async def pause_run(run: RunToChange, api: Api) -> RunDetail:
    """Ask a run to pause after its current batch, until it is resumed. Its groups in flight wait."""
    _refuse_ended(run)
    if run.is_ending and run.desired != "stop":
        detail = "The run has no more steps to make: it ends after its last push, checkpoint and evaluation."
        raise Problem(409, "Run is ending", detail, run_id=run.run_id)
    if not await api.supervisor.pause_run(run.run_id):
        raise is_stopping(run.run_id)
    return await after_change(api, run.run_id)


@router.post("/{run_id}/resume", status_code=202, response_model=RunDetail, responses=documented(404, 409, 429))
async def resume_run(run: RunToChange, api: Api) -> RunDetail:
    """Ask a run to continue: a paused one, whoever paused it, or a failed one, from its newest checkpoint.

    A failed run is queued again. A run that is not paused does not change.
    """
    if run.status == "failed":
        async with api.creating:
            await _refuse_without_checkpoint(run)
            await refuse_if_queue_is_full(api)
            await api.use_files(run.config)
            await api.supervisor.resume_run(run.run_id)
        return await after_change(api, run.run_id)
    _refuse_ended(run, instead=continue_ended(run))
    if not await api.supervisor.resume_run(run.run_id):
        raise is_stopping(run.run_id)
    return await after_change(api, run.run_id)


@router.delete("/{run_id}", status_code=204, responses=documented(404, 409))
async def delete_run(run: RunToChange, api: Api) -> Response:
    """Delete the record of a run that has ended. Its directory, with checkpoints and model, stays."""
    # A resume at the same time would queue the run again; an edit would enter it in the index again.
    async with api.creating, api.editing:
        record = await api.store.get(run.run_id)
        if record is None:
            raise no_such_run(run.run_id)
        if record.status not in TERMINAL:
            stop = f"POST /v1/runs/{run.run_id}/stop first, and delete it when it has stopped."
            raise Problem(409, "Run not ended", f"The run is {record.status}. {stop}", run_id=run.run_id)
        await api.store.delete(run.run_id)
    return Response(status_code=204)


def _refuse_ended(record: RunRecord, *, instead: str = "") -> None:
    if record.status in TERMINAL:
        raise Problem(409, "Run ended", f"The run has ended: it is {record.status}.{instead}", run_id=record.run_id)


def continue_ended(record: RunRecord, *, max_steps: object = None) -> str:
    """Return a sentence, with a leading space, that says how to continue an ended run in a new run.

    Args:
        record: The ended run.
        max_steps: The total number of optimizer steps that the user asked for, if any.
    """
    made = record.progress.step
    if not made:
        return " It made no step: submit it again."
    command = f"headrace submit --from {record.run_id}"
    if isinstance(max_steps, int) and max_steps > record.steps_made:
        command += f" --set max_steps={max_steps}"
    elif made >= record.progress.max_steps:  # else steps are left
        command += f" --set max_steps={record.steps_made + made}"
    return f" Continue it in a new run: `{command}`."


async def _refuse_without_checkpoint(record: RunRecord) -> None:
    checkpoints = RunFiles(Path(record.run_dir)).checkpoints
    if await asyncio.to_thread(lambda: any(checkpoints.glob(f"step_*/{MANIFEST_FILE}"))):
        return
    raise Problem(
        409,
        "No checkpoint",
        f"The run failed before its first checkpoint: {checkpoints} contains none. Submit it again.",
        run_id=record.run_id,
    )


def is_stopping(run_id: str) -> Problem:
    """Return the refusal (409) of a change to a run that was asked to stop."""
    detail = "The run was asked to stop, and is ending. It can no longer be paused, resumed or given more steps."
    return Problem(409, "Run is stopping", detail, run_id=run_id)


async def after_change(api: TrainerApi, run_id: str) -> RunDetail:
    """Read a run again after a change, and return its details. Raises a Problem (404) if it was deleted."""
    record = await api.store.get(run_id)
    if record is None:
        raise no_such_run(run_id)
    return await _detail(api, record)


async def _detail(api: TrainerApi, record: RunRecord) -> RunDetail:
    around = await look_around(api.redis, record, current_run=await api.store.current_run())
    warnings = await asyncio.to_thread(read_warnings, Path(record.run_dir), record.config)
    return detail(record, around, **_waiting(api, record, around), warnings=warnings)


async def _listed(api: TrainerApi, record: RunRecord, current_run: str | None) -> ListedRun:
    around = Surroundings(current_run)
    if record.status in ("running", "paused"):
        around = await look_around(api.redis, record, current_run=current_run)
    return ListedRun(**summary(record).model_dump(), **_waiting(api, record, around))


def _waiting(api: TrainerApi, record: RunRecord, around: Surroundings) -> dict[str, Any]:
    note, stale_after_s = api.supervisor.keeper.note(record.run_id), api.settings.progress_is_stale_after_s
    found = waiting_for(record, around, note=note, stale_after_s=stale_after_s, now_s=time.time())
    return {"waiting_for": found and found.says, "waiting_kind": found and found.kind}


def _place(cursor: str, sort: Sort) -> Place:
    of, lacks, value, created, run_id = decode_cursor(cursor, tuple[str, bool, float | str, float, str])
    if of != sort or isinstance(value, str) != (sort in ("name", "status")):
        raise bad_cursor()
    return lacks, value, created, run_id


def _position(cursor: str) -> Position:
    created_at_s, run_id = decode_cursor(cursor, tuple[float, str])
    if not is_run_id(run_id):
        raise bad_cursor()
    return created_at_s, run_id
