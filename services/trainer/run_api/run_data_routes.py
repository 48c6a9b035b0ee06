"""Routes for a run's output: metrics, events, rollouts, dead letters."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from services.trainer.problems import Problem, documented
from services.trainer.run_api.dead_letters import DeadLetters, list_dead_letters, replay_dead_letter
from services.trainer.run_api.event_stream import parse_event_id
from services.trainer.run_api.run_reference import RunToChange, RunToRead
from services.trainer.run_api.stream_ids import parse_stream_id
from services.trainer.run_api.trainer_api import Api
from services.trainer.run_outputs import read_evaluations, read_metrics, read_rollouts, rollout_steps
from shared.redis.run_record import TERMINAL
from shared.serving.page_cursor import MAX_CURSOR, MEANING, NEXT_MEANING, bad_cursor, decode_cursor, encode_cursor
from shared.serving.query_number import WHOLE

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["run data"])

Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR, description=MEANING)]
MAX_STEP = 10**9
_AFTER_STEP = "Only entries above this optimizer step"


class Metrics(BaseModel):
    """A page of a run's training metrics: one object per optimizer step, with TRL's metric names."""

    run_id: str
    metrics: list[dict[str, Any]]
    next_cursor: str | None = Field(description=NEXT_MEANING)


class RunEvaluations(BaseModel):
    """A page of a run's evaluations: one object per evaluation, with TRL's metric names prefixed with ``eval_``."""

    run_id: str
    evaluations: list[dict[str, Any]]
    next_cursor: str | None = Field(description=NEXT_MEANING)


class Rollouts(BaseModel):
    """A page of one step's trained rollouts: prompt, completion, rewards, advantage and policy versions of each."""

    run_id: str
    step: int | None = Field(description="The optimizer step; null if no rollouts were logged yet")
    newest_step: int | None
    rollouts: list[dict[str, Any]]
    next_cursor: str | None = Field(description=NEXT_MEANING)


@router.get("/metrics", response_model=Metrics, responses=documented(400, 404, 409, 422))
async def get_metrics(
    run: RunToRead,
    after_step: Annotated[int, Query(ge=-1, le=MAX_STEP, description=_AFTER_STEP), WHOLE] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000), WHOLE] = 1000,
    cursor: Cursor = None,
) -> Metrics:
    """Show the metrics of optimizer steps above ``after_step``, oldest first."""
    run_dir = Path(run.run_dir)
    after = after_step if cursor is None else max(after_step, decode_cursor(cursor, float))
    found, has_more = await asyncio.to_thread(read_metrics, run_dir, after_step=after, limit=limit)
    next_cursor = encode_cursor(found[-1]["step"]) if has_more else None
    return Metrics(run_id=run.run_id, metrics=found, next_cursor=next_cursor)


@router.get("/evaluations", response_model=RunEvaluations, responses=documented(400, 404, 409, 422))
async def get_evaluations(
    run: RunToRead,
    after_step: Annotated[int, Query(ge=-1, le=MAX_STEP, description=_AFTER_STEP), WHOLE] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000), WHOLE] = 1000,
    cursor: Cursor = None,
) -> RunEvaluations:
    """Show the evaluations of optimizer steps above ``after_step``, oldest first."""
    run_dir = Path(run.run_dir)
    after = after_step if cursor is None else max(after_step, decode_cursor(cursor, float))
    found, has_more = await asyncio.to_thread(read_evaluations, run_dir, after_step=after, limit=limit)
    next_cursor = encode_cursor(found[-1]["step"]) if has_more else None
    return RunEvaluations(run_id=run.run_id, evaluations=found, next_cursor=next_cursor)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses=documented(400, 404, 409)
    | {200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def get_events(
    run: RunToRead,
    api: Api,
    last_event_id: Annotated[str | None, Header(description="Continue after this event")] = None,
    after: Annotated[
        str | None, Query(max_length=64, description="Same as Last-Event-ID, for clients that cannot set headers")
    ] = None,
) -> Response:
    """Stream the run's events from its beginning, or after the given event, until the run ends."""
    start = parse_event_id(last_event_id or after)
    return api.streams.answer(run.run_id, after=start)


@router.get("/rollouts", response_model=Rollouts, responses=documented(400, 404, 409, 422))
async def get_rollouts(
    run: RunToRead,
    step: Annotated[
        int | None, Query(ge=0, le=MAX_STEP, description="Optimizer step; the newest by default"), WHOLE
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500), WHOLE] = 50,
    cursor: Cursor = None,
) -> Rollouts:
    """Show the rollouts of one optimizer step with their rewards. All pages belong to the step of the first page."""
    offset = 0
    if cursor is not None:
        of_step, offset = decode_cursor(cursor, tuple[int, int])
        if not 0 <= of_step <= MAX_STEP or offset < 0 or step not in (None, of_step):
            raise bad_cursor()
        step = of_step
    run_dir = Path(run.run_dir)
    steps = await asyncio.to_thread(rollout_steps, run_dir)
    newest = steps[-1] if steps else None
    if step is None:
        step = newest
    elif step not in steps:
        there = (
            f"There are rollouts of {len(steps)} steps, {steps[0]} to {steps[-1]}." if steps else "There are none yet."
        )
        raise Problem(404, "No such step", f"No rollouts of step {step} were logged. {there}", run_id=run.run_id)
    if step is None:
        return Rollouts(run_id=run.run_id, step=None, newest_step=None, rollouts=[], next_cursor=None)
    found, has_more = await asyncio.to_thread(read_rollouts, run_dir, step=step, offset=offset, limit=limit)
    next_cursor = encode_cursor((step, offset + len(found))) if has_more else None
    return Rollouts(run_id=run.run_id, step=step, newest_step=newest, rollouts=found, next_cursor=next_cursor)


@router.get("/dead_letters", response_model=DeadLetters, responses=documented(400, 404, 409, 422))
async def get_dead_letters(
    run: RunToRead,
    api: Api,
    limit: Annotated[int, Query(ge=1, le=1000), WHOLE] = 100,
    cursor: Cursor = None,
) -> DeadLetters:
    """List the run's prompt groups that were buried because they could not be processed, each with the reason."""
    after = None if cursor is None else parse_stream_id(decode_cursor(cursor, str))
    if cursor is not None and after is None:
        raise bad_cursor()
    return await list_dead_letters(api.redis, run.run_id, after=after, limit=limit)


@router.post("/dead_letters/{entry}/replay", status_code=202, response_model=None, responses=documented(404, 409))
async def replay(run: RunToChange, entry: str, api: Api) -> dict[str, str]:
    """Put a buried group back into the stream it was buried from. Fix the cause first."""
    if run.status in TERMINAL:
        detail = f"The run is {run.status}, so the group would not be processed."
        raise Problem(409, "Run ended", detail, run_id=run.run_id)
    await replay_dead_letter(api.redis, run.run_id, entry)
    return {"run_id": run.run_id, "entry": entry, "status": "replayed"}
