"""HTTP bodies with which the run API asks any live generator whether its vLLM would serve a run.

    POST /internal/v1/engine/check    EngineCheck -> EngineVerdict

Only generators have vLLM, and only vLLM knows what its options mean.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

ENGINE_CHECK_PATH = "/internal/v1/engine/check"


class EngineCheck(BaseModel):
    """The request: a run's whole config, as it is stored in Redis."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    config: dict[str, Any]


class EngineProblem(BaseModel):
    """A setting that vLLM refuses, and the reason."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    field: str
    message: str


class EngineVerdict(BaseModel):
    """The reply. vLLM would serve the run if ``errors`` is empty."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    errors: list[EngineProblem] = []
    warnings: list[str] = []
