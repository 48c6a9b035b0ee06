"""Routes that take data sets, models and code from clients.

The routes for data sets and models are closed unless HEADRACE_UPLOADS_DIR is set:

    POST /v1/uploads {"files": [{"path", "size", "sha256"}, ...]}     --> says how much of each is here
    PUT  /v1/uploads/{upload_id}/files/{sha256}?offset=N  piece       --> says how many bytes are here now
    ...                                              the last piece   --> completes the directory that runs name

A body goes to the disk as it comes. If it breaks off, its first bytes stay, and the next piece follows them.

The route for code is closed unless HEADRACE_CODE_UPLOADS_DIR is set:

    POST /v1/modules {"name": "rewards", "source": "def ..."}         --> says how a run names the module

The trainer does not parse the source, because that may take long. When a run is submitted, the rewarder or the
sessions service imports the module in a worker.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from services.trainer.problems import Problem, documented
from services.trainer.run_api.trainer_api import Api, TrainerApi
from services.trainer.uploads.module_store import MAX_SOURCE_BYTES, ModuleStore
from services.trainer.uploads.upload_part import Part
from services.trainer.uploads.upload_store import UploadStore
from shared.access.route_table import MAX_UPLOADED_PIECE
from shared.files.file_set import MAX_FILE_BYTES, MAX_FILES, MAX_PATH, SET_ID, SHA256, SetFile
from shared.run_options.wording import what_is_wrong
from shared.service.current_request import name_subject
from shared.service.daemon_thread import in_thread
from shared.serving.http_guard import declared_length
from shared.serving.json_body import BodyError, decode_json, require_json
from shared.serving.query_number import WHOLE

_OCTETS = "application/octet-stream"
_MAX_NESTED = 10 + 5 * MAX_FILES
_MAX_ERRORS = 10
_WRITE_BYTES = 1024 * 1024
"""How much is collected before it is written."""
_SHORTEST_HASHING_S, _BYTES_HASHED_IN_A_SECOND = 600.0, 10_000_000

_ModelT = TypeVar("_ModelT", bound=BaseModel)

router = APIRouter(tags=["uploads"])


class UploadFile(BaseModel):
    """A file that the client will upload: its path, size and hash."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str = Field(min_length=1, max_length=MAX_PATH, description="Path below the upload's directory")
    size: int = Field(ge=0, le=MAX_FILE_BYTES, description="Size in bytes")
    sha256: str = Field(pattern=SHA256, description="Hash of the content, in lower-case hexadecimal digits")


class NewUpload(BaseModel):
    """The files to upload, which form one directory, such as a data set or a model."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: list[UploadFile] = Field(min_length=1, max_length=MAX_FILES)


class UploadedFile(BaseModel):
    """A file of an upload, and how much of it is here."""

    path: str
    size: int
    sha256: str
    received: int = Field(description="Bytes that are here; send what follows them")
    is_whole: bool = Field(description="Whether all of it is here, with the right hash")


class Upload(BaseModel):
    """An upload, and how much of each of its files has arrived."""

    upload_id: str = Field(description="Names the content: the same files have the same id")
    path: str = Field(description="The directory that a run may name once the upload is complete")
    is_complete: bool
    expires_after_s: float = Field(description="The upload is deleted when it was not used for this long, in seconds")
    files: list[UploadedFile]


class UploadedPiece(BaseModel):
    """The state of a file and its upload after a piece of the file has arrived."""

    received: int = Field(description="Bytes of the file that are here")
    is_whole: bool = Field(description="Whether all of the file is here, with the right hash")
    is_complete: bool = Field(description="Whether this was the last file of the upload")


class NewModule(BaseModel):
    """A Python module to upload: the beginning of its name, and its source."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$", description="Beginning of the module's name: letters, digits and _"
    )
    source: str = Field(min_length=1, description=f"The module's text, at most {MAX_SOURCE_BYTES} bytes in UTF-8")


class UploadedModule(BaseModel):
    """An uploaded module: the name by which runs refer to it, and when it expires."""

    module: str = Field(description="The module's name, which ends with the first digits of its source's SHA-256")
    expires_after_s: float = Field(description="The module is deleted when it was not used for this long, in seconds")


def upload_store(api: Api) -> UploadStore:
    """Return the store of uploaded files; a FastAPI dependency.

    Raises:
        Problem: 404 if this deployment takes no uploads.
    """
    if api.uploads is None:
        raise Problem(
            404,
            "Uploads off",
            "This deployment takes no uploads. Its operator allows them with HEADRACE_UPLOADS_DIR of the trainer: a "
            "directory that the generators and the rewarder can read too.",
        )
    return api.uploads


Store = Annotated[UploadStore, Depends(upload_store)]


def module_store(api: Api) -> ModuleStore:
    """Return the store of uploaded Python modules; a FastAPI dependency.

    Raises:
        Problem: 404 if this deployment takes no code.
    """
    if api.modules is None:
        raise Problem(
            404,
            "Code uploads off",
            "This deployment takes no code from clients. Its operator allows it with HEADRACE_CODE_UPLOADS_DIR of the "
            "trainer: a directory on HEADRACE_REWARD_PATH of the rewarder and HEADRACE_TOOL_PATH of the sessions "
            "service. Without it, name functions that are there already, as module:function.",
        )
    return api.modules


def _schema() -> dict[str, Any]:
    """Return the JSON schema of ``NewUpload``, in which the schema of a file is inline instead of a reference."""
    schema = NewUpload.model_json_schema()
    del schema["$defs"]
    schema["properties"]["files"]["items"] = UploadFile.model_json_schema()
    return schema


@router.post(
    "/v1/uploads",
    response_model=Upload,
    responses=documented(404, 413, 415, 422, 507),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}},
)
async def begin_upload(request: Request, store: Store, api: Api) -> Upload:
    """Begin an upload, or ask how much of it is here, as often as needed. Files that are here are not sent again."""
    upload = await _read(request, NewUpload, max_nested=_MAX_NESTED)
    files = [SetFile(file.path, file.size, file.sha256) for file in upload.files]
    async with api.changing_uploads:
        state = await asyncio.to_thread(store.begin, files)
    name_subject(state.upload_id)
    return Upload(**asdict(state), expires_after_s=api.settings.upload_expiry_s)


@router.put(
    "/v1/uploads/{upload_id}/files/{sha256}",
    response_model=UploadedPiece,
    responses=documented(404, 409, 413, 415, 422, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": f"The bytes from `offset` on, at most {MAX_UPLOADED_PIECE}",
            "content": {_OCTETS: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_piece(
    request: Request,
    store: Store,
    api: Api,
    upload_id: Annotated[str, Path(pattern=SET_ID)],
    sha256: Annotated[str, Path(pattern=SHA256)],
    offset: Annotated[int, Query(ge=0, le=MAX_FILE_BYTES, description="Where in the file the piece begins"), WHOLE],
) -> UploadedPiece:
    """Add a piece to a file. Pieces come in order; the answer to the last one says whether the hash is right.

    A piece of no bytes checks a file whose last piece was not answered.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _OCTETS:
        raise BodyError(415, "Not bytes", f"Send the bytes as they are, with the header 'Content-Type: {_OCTETS}'.")
    size = declared_length(request.scope)
    if size > MAX_UPLOADED_PIECE:
        raise BodyError(413, "Body too large", f"A piece may have at most {MAX_UPLOADED_PIECE} bytes.")
    async with store.lock_of(upload_id, sha256):
        part = await asyncio.to_thread(store.open_part, upload_id, sha256, offset=offset, size=size)
        with store.disk.or_507():
            try:
                await _write(request.stream(), part)
            finally:
                await asyncio.to_thread(part.close)
        if part.received < part.file.size:
            state = await asyncio.to_thread(store.state, upload_id)
        else:
            await _check(part, store, api)
            async with api.changing_uploads:
                state = await asyncio.to_thread(store.close_part, upload_id, part)
    (file, *_) = (file for file in state.files if file.sha256 == sha256)
    return UploadedPiece(received=file.received, is_whole=file.is_whole, is_complete=state.is_complete)


@router.post(
    "/v1/modules",
    response_model=UploadedModule,
    responses=documented(404, 409, 413, 415, 422, 507),
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": NewModule.model_json_schema()}}}
    },
)
async def upload_module(
    request: Request, store: Annotated[ModuleStore, Depends(module_store)], api: Api
) -> UploadedModule:
    """Upload a Python module with reward functions, tools, environments or an agent for runs. It can be repeated."""
    new = await _read(request, NewModule, max_nested=10)
    module = await asyncio.to_thread(store.add, new.name, new.source)
    name_subject(module)
    return UploadedModule(module=module, expires_after_s=api.settings.upload_expiry_s)


async def _check(part: Part, store: UploadStore, api: TrainerApi) -> None:
    """Check the hash of an uploaded file, in a thread of its own, which takes no shared thread and delays no exit.

    Raises:
        Problem: 503 if the file could not be read in time; otherwise as ``check_part`` raises.
    """
    timeout_s = _SHORTEST_HASHING_S + part.file.size / _BYTES_HASHED_IN_A_SECOND
    async with api.hashing_uploads:
        try:
            await in_thread(lambda: store.check_part(part), timeout_s=timeout_s, name="check an upload")
        except TimeoutError as error:
            detail = f"The file could not be read within {timeout_s:.0f} s. A piece of no bytes checks it again."
            raise Problem(503, "Storage unavailable", detail) from error


async def _write(pieces: AsyncIterator[bytes], part: Part) -> None:
    """Write a request's body to the disk as it arrives.

    If the client disconnects, the bytes until then are kept. If they cannot be written, or are more than announced,
    all of them are removed.
    """
    waiting = bytearray()
    try:
        try:
            async for piece in pieces:
                waiting += piece
                if len(waiting) >= _WRITE_BYTES:
                    data, waiting = bytes(waiting), bytearray()
                    await asyncio.to_thread(part.write, data)
        except ClientDisconnect:
            await asyncio.to_thread(part.write, bytes(waiting))
            raise
        await asyncio.to_thread(part.write, bytes(waiting))
    except (OSError, Problem):
        await asyncio.to_thread(part.undo)
        raise


async def _read(request: Request, kind: type[_ModelT], *, max_nested: int) -> _ModelT:
    """Decode the JSON body of a request, and validate it.

    Args:
        request: The request whose body is read.
        kind: The pydantic model of the body.
        max_nested: Most nested values of the body.

    Raises:
        BodyError: The body is not declared as JSON, or is not JSON.
        Problem: 422 with the mistakes.
    """
    require_json(request.headers.get("content-type", ""))
    try:
        return kind.model_validate(decode_json(await request.body(), max_nested=max_nested))
    except ValidationError as error:
        found = error.errors(include_url=False)[:_MAX_ERRORS]
        errors = [(".".join(map(str, item["loc"]))[:100], what_is_wrong([item])) for item in found]
        detail = "; ".join(f"{field}: {message}" if field else message for field, message in errors)
        raise Problem(422, "Invalid request", detail, errors=errors) from error
