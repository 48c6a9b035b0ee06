"""Bodies of the check whether vLLM would serve a run. The run API asks any live generator.

    POST /internal/v1/engine/check    EngineCheck -> EngineVerdict

Only generators have vLLM, and only vLLM knows what its options mean.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

ENGINE_CHECK_PATH = "/internal/v1/engine/check"


class EngineCheck(BaseModel):
    """A run's whole config, as stored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    config: dict[str, Any]


class EngineProblem(BaseModel):
    """A setting and what is wrong with it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    field: str
    message: str


class EngineVerdict(BaseModel):
    """vLLM's verdict. No errors means yes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    errors: list[EngineProblem] = []
    warnings: list[str] = []
