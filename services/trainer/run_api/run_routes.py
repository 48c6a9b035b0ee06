"""Routes that submit, show, pause, resume, stop and delete runs."""

import asyncio
import base64
import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from services.trainer.checkpoints.manifest import MANIFEST_FILE
from services.trainer.problems import Problem, documented, no_such_run
from services.trainer.run_api.idempotency import Ticket
from services.trainer.run_api.run_listing import Position, find_runs
from services.trainer.run_api.run_view import (
    ListedRun,
    RunDetail,
    RunSummary,
    Surroundings,
    detail,
    look_around,
    summary,
)
from services.trainer.run_api.trainer_api import TrainerApi, trainer_api
from services.trainer.run_api.waiting import waiting_for
from services.trainer.run_files import RunFiles
from services.trainer.submit_checks.run_validation import ValidRun
from shared.disk_sync import sync
from shared.errors import NoRoomError
from shared.redis.run_record import TERMINAL, RunRecord, Status
from shared.run_options.run_config import RunConfig
from shared.service.current_request import name_subject
from shared.serving.json_body import decode_json, require_json
from shared.serving.page_cursor import MAX_CURSOR, MEANING, NEXT_MEANING, bad_cursor, decode_cursor, encode_cursor
from shared.serving.query_number import WHOLE

_MAX_NESTED = 10_000
"""Maximum number of nested values in a run. Its largest tables are keyword arguments of rewards and templates."""

_HEADERS_OF_A_SUBMIT: dict[str, Any] = {
    "Location": {"description": "Path of the run", "required": True, "schema": {"type": "string"}},
    "Idempotent-Replayed": {
        "description": "The answer to the first request with this Idempotency-Key, given again",
        "schema": {"type": "string", "enum": ["true"]},
    },
}

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Api = Annotated[TrainerApi, Depends(trainer_api)]


class SubmittedRun(BaseModel):
    """Answer to a submit or to a dry run."""

    valid: bool = True
    warnings: list[str] = Field(description="Possible surprises; the run starts all the same")
    derived: dict[str, Any] = Field(
        description="Quantities that follow from the settings: steps, prompt groups, completions"
    )
    run: RunSummary | None = Field(default=None, description="The run; null in a dry run")


class RunList(BaseModel):
    """A page of runs, newest first."""

    runs: list[ListedRun]
    next_cursor: str | None = Field(description=NEXT_MEANING)


@router.post(
    "",
    status_code=202,
    response_model=SubmittedRun,
    responses=documented(409, 415, 429)
    | {
        200: {"model": SubmittedRun, "description": "A dry run"},
        202: {"model": SubmittedRun, "description": "The run is queued", "headers": _HEADERS_OF_A_SUBMIT},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RunConfig"}}},
        }
    },
)
async def submit_run(
    request: Request,
    api: Api,
    dry_run: Annotated[bool, Query(description="Validate, and start nothing")] = False,
    idempotency_key: Annotated[str | None, Header(description="Makes sending the same run twice harmless")] = None,
) -> Response:
    """Validate a run and queue it. One answer reports every error that can be found now."""
    require_json(request.headers.get("content-type", ""))
    body = await request.body()
    raw = decode_json(body, max_nested=_MAX_NESTED)
    if dry_run:
        valid = await api.validator.validate(raw)
        return JSONResponse(SubmittedRun(warnings=valid.warnings, derived=valid.derived).model_dump())
    if idempotency_key is None:
        return _accepted(await _submit(api, raw, run_id=_new_run_id()))
    ticket = await api.idempotency.claim(idempotency_key, body=body, run_id=_new_run_id())
    if ticket.answer is not None:
        return _accepted(ticket.answer, **{"Idempotent-Replayed": "true"})
    return _accepted(await _submit_once(api, raw, ticket))


async def _submit_once(api: TrainerApi, raw: Any, ticket: Ticket) -> dict[str, Any]:
    """Submit under a claimed Idempotency-Key. A refused run, or one without room in Redis, releases the key."""
    try:
        answer = await _submit(api, raw, run_id=ticket.run_id)
    except (Problem, NoRoomError):
        # If a retry continued an earlier claim, the run may exist; with a new id there would be two.
        if await api.store.get(ticket.run_id) is None:
            await api.idempotency.release(ticket)
        raise
    with contextlib.suppress(NoRoomError):  # the run exists; a later retry finds it by its id
        await api.idempotency.keep(ticket, answer)
    return answer


async def _submit(api: TrainerApi, raw: Any, *, run_id: str) -> dict[str, Any]:
    valid = await api.validator.validate(raw)
    # A run that exists already was created by a process that died before it could answer.
    record = await api.store.get(run_id) or await _create(api, valid, run_id)
    name_subject(run_id)
    api.supervisor.wake()
    answer = SubmittedRun(warnings=valid.warnings, derived=valid.derived, run=summary(record))
    return answer.model_dump()


async def _create(api: TrainerApi, valid: ValidRun, run_id: str) -> RunRecord:
    async with api.creating:  # one at a time, or two could take the last place
        await refuse_if_queue_is_full(api)
        return await _create_there(api, valid, run_id)


async def refuse_if_queue_is_full(api: TrainerApi) -> None:
    """Raise a Problem if the queue of runs is full."""
    most = api.settings.max_queued_runs
    if await api.store.lists.num_queued() < most:
        return
    raise Problem(
        429,
        "Too many queued runs",
        f"{most} runs are queued already. Submit this one when some have ended, stop queued runs that are no "
        "longer wanted, or raise HEADRACE_MAX_QUEUED_RUNS.",
        headers={"Retry-After": "60"},
    )


async def _create_there(api: TrainerApi, valid: ValidRun, run_id: str) -> RunRecord:
    run_dir = api.settings.runs_dir / run_id
    try:
        await asyncio.to_thread(_write_config, run_dir, valid.config)
    except OSError as error:
        raise Problem(
            503,
            "Storage unavailable",
            f"The run's directory could not be created in {api.settings.runs_dir}: {error.strerror}. Free space or "
            "fix the permissions there, or set HEADRACE_RUNS_DIR.",
        ) from error
    try:
        return await api.store.create(run_id, valid.config, run_dir=str(run_dir))
    except NoRoomError:
        await asyncio.to_thread(_remove_config, run_dir)
        raise


@router.get("", response_model=RunList, responses=documented(400, 422))
async def list_runs(
    api: Api,
    status: Annotated[list[Status] | None, Query(description="Only runs with one of these statuses")] = None,
    name: Annotated[str | None, Query(max_length=64, description="Only runs with this name")] = None,
    limit: Annotated[int, Query(ge=1, le=1000), WHOLE] = 100,
    cursor: Annotated[str | None, Query(max_length=MAX_CURSOR, description=MEANING)] = None,
) -> RunList:
    """List runs, newest first."""
    before = None if cursor is None else _position(cursor)
    found = await find_runs(api.store, limit=limit, before=before, statuses=frozenset(status or ()), name=name)
    current_run = await api.store.current_run()
    return RunList(
        runs=[await _listed(api, record, current_run) for record in found.records],
        next_cursor=None if found.next_before is None else encode_cursor(found.next_before),
    )


@router.get("/{run_id}", response_model=RunDetail, responses=documented(404))
async def get_run(run_id: str, api: Api) -> RunDetail:
    """Show one run: its progress, and why it is waiting."""
    return await _detail(api, await existing_run(api, run_id))


@router.post("/{run_id}/stop", status_code=202, response_model=RunDetail, responses=documented(404))
async def stop_run(run_id: str, api: Api) -> RunDetail:
    """Ask a run to stop after its current step, with a checkpoint and a final model. Repeating it has no effect."""
    await existing_run(api, run_id)
    await api.supervisor.stop_run(run_id)
    return await _detail(api, await existing_run(api, run_id))


@router.post("/{run_id}/pause", status_code=202, response_model=RunDetail, responses=documented(404, 409))
async def pause_run(run_id: str, api: Api) -> RunDetail:
    """Ask a run to pause after its current batch, until it is resumed. Its groups in flight wait."""
    _refuse_ended(await existing_run(api, run_id))
    if not await api.supervisor.pause_run(run_id):
        raise _is_stopping(run_id)
    return await _detail(api, await existing_run(api, run_id))


@router.post("/{run_id}/resume", status_code=202, response_model=RunDetail, responses=documented(404, 409, 429))
async def resume_run(run_id: str, api: Api) -> RunDetail:
    """Ask a paused run to continue, whether a user or its rewards paused it, or a failed run from its checkpoint.

    A failed run is queued again. A run that is not paused does not change.
    """
    record = await existing_run(api, run_id)
    if record.status == "failed":
        async with api.creating:
            await _refuse_without_checkpoint(record)
            await refuse_if_queue_is_full(api)
            await api.supervisor.resume_run(run_id)
        return await _detail(api, await existing_run(api, run_id))
    _refuse_ended(record)
    if not await api.supervisor.resume_run(run_id):
        raise _is_stopping(run_id)
    return await _detail(api, await existing_run(api, run_id))


@router.delete("/{run_id}", status_code=204, responses=documented(404, 409))
async def delete_run(run_id: str, api: Api) -> Response:
    """Delete the record of a run that has ended. Its directory, with checkpoints and model, stays."""
    record = await existing_run(api, run_id)
    if record.status not in TERMINAL:
        raise Problem(
            409,
            "Run not ended",
            f"The run is {record.status}. POST /v1/runs/{run_id}/stop first, and delete it when it has stopped.",
            run_id=run_id,
        )
    await api.store.delete(run_id)
    return Response(status_code=204)


async def existing_run(api: TrainerApi, run_id: str) -> RunRecord:
    """Return the run's record, or raise the 404 problem."""
    record = await api.store.get(run_id) if is_run_id(run_id) else None
    if record is None:
        raise no_such_run(run_id if is_run_id(run_id) else "")
    return record


def _refuse_ended(record: RunRecord) -> None:
    if record.status in TERMINAL:
        raise Problem(409, "Run ended", f"The run has ended: it is {record.status}.", run_id=record.run_id)


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


def _is_stopping(run_id: str) -> Problem:
    detail = "The run was asked to stop, and ends after its current step. It can no longer be paused or resumed."
    return Problem(409, "Run is stopping", detail, run_id=run_id)


def is_run_id(text: str) -> bool:
    """Whether ``text`` could be a run id. Anything else never reaches Redis."""
    return 0 < len(text) <= 64 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()


async def _detail(api: TrainerApi, record: RunRecord) -> RunDetail:
    around = await look_around(api.redis, record, current_run=await api.store.current_run())
    return detail(record, around, **_waiting(api, record, around))


async def _listed(api: TrainerApi, record: RunRecord, current_run: str | None) -> ListedRun:
    around = Surroundings(current_run)
    if record.status in ("running", "paused"):
        around = await look_around(api.redis, record, current_run=current_run)
    return ListedRun(**summary(record).model_dump(), **_waiting(api, record, around))


def _waiting(api: TrainerApi, record: RunRecord, around: Surroundings) -> dict[str, Any]:
    note, stale_after_s = api.supervisor.note(record.run_id), api.settings.progress_is_stale_after_s
    found = waiting_for(record, around, note=note, stale_after_s=stale_after_s, now_s=time.time())
    return {"waiting_for": found and found.says, "waiting_kind": found and found.kind}


def _accepted(answer: dict[str, Any], **headers: str) -> JSONResponse:
    headers["Location"] = f"/v1/runs/{answer['run']['run_id']}"
    return JSONResponse(answer, status_code=202, headers=headers)


def _new_run_id() -> str:
    """Return an id of 128 random bits that can be read aloud and is safe in URLs, paths and Redis hash tags."""
    return "run-" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


def _write_config(run_dir: Path, config: RunConfig) -> None:
    """Write the run's options so that a power loss leaves the file whole."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(config.model_dump(mode="json")), indent=2)
    aside = run_dir / f"config.{hashlib.sha256(text).hexdigest()[:8]}.tmp"
    with aside.open("wb") as file:
        file.write(text + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, run_dir / "config.json")
    sync(run_dir)


def _remove_config(run_dir: Path) -> None:
    """Undo ``_write_config``. A directory with other files stays."""
    with contextlib.suppress(OSError):
        (run_dir / "config.json").unlink()
        run_dir.rmdir()


def _position(cursor: str) -> Position:
    created_at_s, run_id = decode_cursor(cursor, tuple[float, str])
    if not is_run_id(run_id):
        raise bad_cursor()
    return created_at_s, run_id
