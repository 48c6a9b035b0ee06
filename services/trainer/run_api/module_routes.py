"""The route that takes code from clients. It is closed unless HEADRACE_CODE_UPLOADS_DIR is set.

    POST /v1/modules {"name": "rewards", "source": "def ..."} --> {"module": "rewards_1a2b3c4d5e6f"}

A run then names ``rewards_1a2b3c4d5e6f:function``. The trainer does not look into the source, since parsing may take
long: the check of the run imports it, in a worker of the service that runs it.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from services.trainer.problems import Problem, documented
from services.trainer.run_api.request_body import read_body
from services.trainer.run_api.trainer_api import TrainerApi, trainer_api
from services.trainer.uploads.module_store import ModuleStore
from shared.service.current_request import name_subject

_MAX_NESTED = 10

router = APIRouter(prefix="/v1/modules", tags=["uploads"])

Api = Annotated[TrainerApi, Depends(trainer_api)]


class NewModule(BaseModel):
    """A Python module in one file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$", description="Beginning of the module's name: letters, digits and _"
    )
    source: str = Field(min_length=1, max_length=262_144, description="The module's text")


class UploadedModule(BaseModel):
    """A module that runs may name."""

    module: str = Field(description="The module's name, which ends with the first digits of its source's SHA-256")
    expires_after_s: float = Field(description="The module is deleted when it was not used for this long, in seconds")


def module_store(api: Api) -> ModuleStore:
    """Return the uploaded modules; a FastAPI dependency.

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


@router.post(
    "",
    response_model=UploadedModule,
    responses=documented(404, 409, 413, 415, 422, 507),
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": NewModule.model_json_schema()}}}
    },
)
async def upload_module(
    request: Request, store: Annotated[ModuleStore, Depends(module_store)], api: Api
) -> UploadedModule:
    """Upload a module with functions, tools or environments of a run. It can be repeated."""
    new = await read_body(request, NewModule, max_nested=_MAX_NESTED)
    module = await asyncio.to_thread(store.add, new.name, new.source)
    name_subject(module)
    return UploadedModule(module=module, expires_after_s=api.settings.upload_expiry_s)
