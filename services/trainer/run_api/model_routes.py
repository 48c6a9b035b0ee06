"""Routes that give the final model of a run to clients: its files, and ranges of their bytes."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from services.trainer.problems import Problem, documented
from services.trainer.run_api.run_reference import RunToRead
from services.trainer.run_api.trainer_api import Api, TrainerApi
from services.trainer.run_files import RunFiles
from shared.files.file_set import MAX_PATH, SetFile
from shared.redis.run_record import TERMINAL, RunRecord
from shared.service.daemon_thread import in_thread

_OCTETS = "application/octet-stream"
_READ_BYTES = 1024 * 1024
_HASHING_S = 6 * 3600.0
_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII)

router = APIRouter(prefix="/v1/runs/{run_id}/model", tags=["models"])


class ModelFile(BaseModel):
    """A file of a run's final model: its path below the model's directory, its size and its hash."""

    path: str
    size: int = Field(description="Size in bytes")
    sha256: str


class Model(BaseModel):
    """The final model of a run, as a list of its files."""

    run_id: str
    files: list[ModelFile]


@router.get("", response_model=Model, responses=documented(404, 409))
async def list_model_files(run: RunToRead, api: Api) -> Model:
    """List the files of the run's final model. The first request reads all of them, for their hashes."""
    async with api.hashing:
        try:
            found = await _listed(run, api)
        except FileNotFoundError:  # it was replaced
            found = await _listed(run, api)
    if not found:
        raise _no_model(run)
    return Model(run_id=run.run_id, files=[_shown(file) for file in found])


async def _listed(run: RunRecord, api: TrainerApi) -> list[SetFile]:
    """List the files in a daemon thread: reading a large model must not delay the end of this process."""
    try:
        return await in_thread(
            lambda: api.exported_files.list(_directory(run)), timeout_s=_HASHING_S, name="hash a model"
        )
    except TimeoutError as error:
        detail = "The model could not be read within six hours. Copy it from the machine of the trainer."
        raise Problem(503, "File unavailable", detail, run_id=run.run_id) from error


@router.get(
    "/file",
    response_class=StreamingResponse,
    responses=documented(404, 409, 416, 422)
    | {
        200: {"content": {_OCTETS: {}}, "description": "The file"},
        206: {"content": {_OCTETS: {}}, "description": "The range of the file"},
    },
)
async def get_model_file(
    run: RunToRead,
    api: Api,
    path: Annotated[str, Query(min_length=1, max_length=MAX_PATH, description="Path of the file, as it is listed")],
    range_: Annotated[
        str | None, Header(alias="Range", description="`bytes=FIRST-LAST`; several ranges are answered with the file")
    ] = None,
) -> Response:
    """Send a file of the run's final model, or a range of it."""
    try:
        file = await asyncio.to_thread(api.exported_files.open, _directory(run), path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_model(run) from error
    except OSError as error:
        detail = f"The file cannot be opened: {error.strerror}. Try again later."
        raise Problem(503, "File unavailable", detail, run_id=run.run_id) from error
    if file is None:
        detail = f"The model has no file with this path. GET /v1/runs/{run.run_id}/model lists its files."
        raise Problem(404, "No such file", detail, run_id=run.run_id)
    size = os.fstat(file.fileno()).st_size
    first, end, is_part = 0, size, False
    if (wanted := _range(range_, size)) is not None:
        (first, end), is_part = wanted, True
    if first >= end and is_part:
        file.close()
        raise Problem(416, "No such range", f"The file has {size} bytes.", headers={"Content-Range": f"bytes */{size}"})
    headers = {"Content-Length": str(end - first), "Accept-Ranges": "bytes"}
    if is_part:
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
    return _FileAnswer(file, first, end, status_code=206 if is_part else 200, headers=headers)


class _FileAnswer(StreamingResponse):
    """Sends a range of an open file, and closes the file even if the client disconnects before the first byte."""

    def __init__(self, file: BinaryIO, first: int, end: int, *, status_code: int, headers: dict[str, str]) -> None:
        super().__init__(_bytes(file, first, end), status_code=status_code, headers=headers, media_type=_OCTETS)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def _bytes(file: BinaryIO, first: int, end: int) -> AsyncIterator[bytes]:
    while first < end:
        data = await asyncio.to_thread(os.pread, file.fileno(), min(_READ_BYTES, end - first), first)
        if not data:
            return
        first += len(data)
        yield data


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the positions of a range's first byte and of the byte after its last; None for the whole file.

    A header that is not understood is ignored, as RFC 9110 (section 14.2) allows.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        return max(0, size - int(found[2])), size
    first, last = int(found[1]), int(found[2] or size)
    return None if found[2] and last < first else (first, min(last + 1, size))


def _directory(run: RunRecord) -> Path:
    return RunFiles(Path(run.run_dir)).model


def _no_model(run: RunRecord) -> Problem:
    if run.status in TERMINAL:
        detail = f"The run is {run.status}, and has left no final model in its directory."
    else:
        detail = f"The run is {run.status}. Its final model is written when it ends; `stop` ends it with a model."
    return Problem(404, "No such model", detail, run_id=run.run_id)


def _shown(file: SetFile) -> ModelFile:
    return ModelFile(path=file.path, size=file.size, sha256=file.sha256)
