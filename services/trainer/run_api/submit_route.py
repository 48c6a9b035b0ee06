"""The route that submits a run. Sending the same run twice, with an Idempotency-Key, queues it once.

body --decode--> validate --room in the queue?--> config.json in the run's directory --> record in Redis, queued
                                                  with links to the checkpoint to begin from
"""

import asyncio
import base64
import contextlib
import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from services.trainer.beginning.held_files import hold, let_go
from services.trainer.problems import Problem, documented, invalid_run
from services.trainer.run_api.idempotency import Ticket
from services.trainer.run_api.run_view import RunSummary, summary
from services.trainer.run_api.trainer_api import Api, TrainerApi
from services.trainer.submit_checks.run_validation import ValidRun
from shared.beginning import Beginning
from shared.errors import NoRoomError, UserError
from shared.files.disk_sync import write_whole
from shared.redis.run_record import RunRecord
from shared.run_options.run_config import RunConfig
from shared.service.current_request import name_subject
from shared.serving.json_body import decode_json, require_json

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


class SubmittedRun(BaseModel):
    """The result of a submit or a dry run: warnings, derived quantities and, unless it was a dry run, the run."""

    valid: bool = True
    warnings: list[str] = Field(description="Possible surprises; the run starts all the same")
    derived: dict[str, Any] = Field(
        description="Quantities that follow from the settings: steps, prompt groups, completions"
    )
    run: RunSummary | None = Field(default=None, description="The run; null in a dry run")


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
    """Submit a run under a claimed Idempotency-Key. The key is released if the run is refused or Redis has no room."""
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
    await api.use_files(raw)  # now: an upload that expires after its files were checked would be missing
    valid = await api.validator.validate(raw)
    record = await _create(api, valid, run_id)
    name_subject(run_id)
    api.supervisor.wake()
    answer = SubmittedRun(warnings=valid.warnings, derived=valid.derived, run=summary(record))
    return answer.model_dump()


async def _create(api: TrainerApi, valid: ValidRun, run_id: str) -> RunRecord:
    async with api.creating:  # one at a time, or two could take the last place, or create the same run
        # Created already by a process that died, or a request that took too long, before it could answer.
        if (record := await api.store.get(run_id)) is not None:
            return record
        await refuse_if_queue_is_full(api)
        return await _create_there(api, valid, run_id)


async def refuse_if_queue_is_full(api: TrainerApi) -> None:
    """Raise a Problem (429) if the queue of runs is full."""
    most = api.settings.max_queued_runs
    if await api.store.num_queued() < most:
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
    await write_config(run_dir, valid.config)
    try:
        beginning = None if valid.beginning is None else await _held(valid.beginning, run_dir)
        return await api.store.create(run_id, valid.config, run_dir=str(run_dir), beginning=beginning)
    except (NoRoomError, Problem):
        await asyncio.to_thread(_remove_config, run_dir)
        raise


async def _held(beginning: Beginning, run_dir: Path) -> Beginning:
    """Link the checkpoint that the run begins from into its directory, because another run may prune the original."""
    try:
        return await asyncio.to_thread(hold, beginning, run_dir)
    except UserError as error:
        raise invalid_run([(error.field or "", str(error))]) from error
    except OSError as error:
        raise _not_written(run_dir, error) from error


def _accepted(answer: dict[str, Any], **headers: str) -> JSONResponse:
    headers["Location"] = f"/v1/runs/{answer['run']['run_id']}"
    return JSONResponse(answer, status_code=202, headers=headers)


def _new_run_id() -> str:
    """Return an id of 128 random bits that can be read aloud and is safe in URLs, paths and Redis hash tags."""
    return "run-" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


async def write_config(run_dir: Path, config: RunConfig) -> None:
    """Write the run's options into its directory so that a power loss leaves the file whole.

    Raises:
        Problem: 503 if the directory cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(config.model_dump(mode="json")), indent=2) + b"\n"
    aside = f".{hashlib.sha256(text).hexdigest()[:8]}.tmp"
    try:
        await asyncio.to_thread(write_whole, run_dir / "config.json", text, aside=aside)
    except OSError as error:
        raise _not_written(run_dir, error) from error


def _not_written(run_dir: Path, error: OSError) -> Problem:
    return Problem(
        503,
        "Storage unavailable",
        f"The run's directory could not be written in {run_dir.parent}: {error.strerror}. Free space or fix the "
        "permissions there, or set HEADRACE_RUNS_DIR.",
    )


def _remove_config(run_dir: Path) -> None:
    """Undo ``write_config`` and ``hold``. A directory with other files stays."""
    with contextlib.suppress(OSError):
        let_go(run_dir)
        (run_dir / "config.json").unlink()
        run_dir.rmdir()
