"""The route that changes a run after its submit. The body is a JSON merge patch (RFC 7396) of four settings.

    name, tags, metadata    at any time
    max_steps               until the run is ending; more than the steps it has made

    patch --merge--> config, checked as at submit --> config.json in the run's directory --> record in Redis

A name, tags or metadata that are null are removed, and so is an entry of ``metadata`` that is null.
"""

from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, Request

from services.trainer.problems import Problem, documented, invalid_run, no_such_run
from services.trainer.run_api.run_reference import RunToChange
from services.trainer.run_api.run_routes import after_change, continue_ended, is_stopping
from services.trainer.run_api.run_view import RunDetail
from services.trainer.run_api.submit_route import write_config
from services.trainer.run_api.trainer_api import Api
from shared.errors import UserError
from shared.redis.run_record import TERMINAL, RunRecord
from shared.run_options.labels import MAX_METADATA, MAX_TAGS
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.serving.json_body import decode_json, require_json

router = APIRouter(prefix="/v1/runs", tags=["runs"])


EDITABLE = ("name", "tags", "metadata", "max_steps")
_MAX_NESTED = 4 + MAX_TAGS + 4 * MAX_METADATA


def _schema() -> dict[str, Any]:
    """Return the JSON schema of a patch: the schemas of the four settings in a run, without their defaults."""
    settings = RunConfig.model_json_schema()["properties"]
    properties = {name: {key: settings[name][key] for key in settings[name] if key != "default"} for name in EDITABLE}
    kinds = properties["metadata"]["additionalProperties"]["anyOf"]
    properties["metadata"]["additionalProperties"] = {"anyOf": [*kinds, {"type": "null"}]}
    for name in ("tags", "metadata"):  # the schema of a name has it
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    return {"type": "object", "additionalProperties": False, "properties": properties}


@router.patch(
    "/{run_id}",
    response_model=RunDetail,
    responses=documented(404, 409, 415, 422),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _schema()}},
        }
    },
)
async def edit_run(run: RunToChange, request: Request, api: Api) -> RunDetail:
    """Change the name, tags or metadata of a run, or its number of steps."""
    require_json(request.headers.get("content-type", ""))
    patch = _patch(decode_json(await request.body(), max_nested=_MAX_NESTED))
    async with api.editing:  # one at a time, or one edit could undo another
        record = await api.store.get(run.run_id)
        if record is None:
            raise no_such_run(run.run_id)
        if "max_steps" in patch:
            _check_max_steps(record, patch["max_steps"])
        config = _merged(record, patch)
        await write_config(Path(record.run_dir), config)
        await api.store.change_config(record, config)
    return await after_change(api, run.run_id)


def _patch(raw: Any) -> dict[str, Any]:
    known = ", ".join(EDITABLE)
    if not isinstance(raw, dict):
        raise invalid_run([("", f"a change is a JSON object with {known}, or some of them")])
    patch = cast("dict[str, Any]", raw)
    if unknown := [name for name in patch if name not in EDITABLE]:
        why = f"cannot be changed after the submit; {known} can"
        raise invalid_run([(name, why) for name in unknown])
    return patch


def _check_max_steps(record: RunRecord, max_steps: object) -> None:
    if record.status in ("finished", "stopped"):
        detail = f"The run has ended: it is {record.status}.{continue_ended(record, max_steps=max_steps)}"
        raise Problem(409, "Run ended", detail, run_id=record.run_id)
    if record.desired == "stop" and record.status not in TERMINAL:
        raise is_stopping(record.run_id)
    made = record.steps_made
    if record.is_ending:
        raise Problem(409, "Run is ending", "The run has made its last step, and ends soon.", run_id=record.run_id)
    if not isinstance(max_steps, int) or max_steps <= made:
        why = f"must be a whole number above {made}, the optimizer steps that the run has made"
        raise invalid_run([("max_steps", why)], run_id=record.run_id)


def _merged(record: RunRecord, patch: dict[str, Any]) -> RunConfig:
    """Return the run's settings with a patch applied.

    Raises:
        Problem: 422 with a sentence for each wrong setting.
    """
    new: dict[str, Any] = record.config | patch
    if isinstance(patch.get("metadata"), dict):
        entries = record.config.get("metadata", {}) | patch["metadata"]
        new["metadata"] = {name: value for name, value in entries.items() if value is not None}
    try:
        return parse_run_config(new)
    except UserError as error:
        problems = error.problems or [(error.field or "", str(error))]
        raise invalid_run(problems, run_id=record.run_id) from error
