"""The generator's settings, read from the environment once, at the entry point."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from shared.settings import AdvertisedSettings, from_environment


class GeneratorSettings(AdvertisedSettings):
    """Settings of one generator process: its GPUs, vLLM engine arguments, and deadlines."""

    push_address: str = Field(
        default="",
        description="Name or address of this host on the network with the trainer; NCCL uses its interface. "
        "If empty, NCCL chooses one itself",
    )
    gpu_claims_dir: Path | None = Field(
        default=None, description="Directory that all replicas on this machine share; each claims its own GPUs there"
    )
    gpus_per_replica: int = Field(default=1, ge=1, description="GPUs that a replica claims in gpu_claims_dir")
    engine_args: Annotated[dict[str, Any], NoDecode] = Field(
        default={}, description="JSON object of vLLM engine arguments, which override a run's and headrace's"
    )
    default_engine_args: Annotated[dict[str, Any], NoDecode] = Field(
        default={}, description="JSON object of vLLM engine arguments, which a run's and engine_args override"
    )
    poll_every_s: float = Field(default=0.25, gt=0, description="How often to ask Redis which run is current")
    engine_check_timeout_s: float = Field(default=60.0, gt=0, description="How long vLLM may check a run's options")
    engine_hang_timeout_s: float = Field(
        default=300.0, gt=0, description="Longest time that a step of vLLM may take before its engine is replaced"
    )
    engine_start_timeout_s: float = Field(
        default=1800.0, gt=0, description="How long vLLM may take to load a model, with its download from the hub"
    )

    @property
    def given_engine_args(self) -> dict[str, dict[str, Any]]:
        """The operator's vLLM engine arguments, by the environment variable that sets them."""
        return {
            "HEADRACE_ENGINE_ARGS": self.engine_args,
            "HEADRACE_DEFAULT_ENGINE_ARGS": self.default_engine_args,
        }

    def args_beside(self, of_run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine arguments that an operator's variables add to a run's ``vllm:`` section, ``of_run``.

        HEADRACE_ENGINE_ARGS overrides the run's arguments, and the run's arguments override
        HEADRACE_DEFAULT_ENGINE_ARGS.
        """
        defaults = {name: value for name, value in self.default_engine_args.items() if name not in of_run}
        return {**defaults, **self.engine_args}

    @field_validator("engine_args", "default_engine_args", mode="before")
    @classmethod
    def _engine_args_are_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            parsed: Any = json.loads(value or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f'not JSON ({error}); write an object such as {{"max_num_seqs": 64}}') from error
        if not isinstance(parsed, dict):
            raise ValueError('must be a JSON object such as {"max_num_seqs": 64}')  # noqa: TRY004  pydantic's protocol
        return cast("dict[str, Any]", parsed)


def read_settings() -> GeneratorSettings:
    """Read the settings of this process from its ``HEADRACE_`` environment variables.

    Raises:
        UserError: A variable is wrong; the message names it.
    """
    return from_environment(GeneratorSettings)
