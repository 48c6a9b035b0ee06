"""Settings of the rewarder, read once from ``HEADRACE_*`` variables."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.rewarder.sandbox.chosen import DEFAULT_IMAGE, Kind, SandboxChoice
from shared.settings import ServiceSettings

MIB = 1024 * 1024


class RewarderSettings(ServiceSettings):
    """What the rewarder needs besides what all services share."""

    reward_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(), description="Directories with users' reward modules, separated like PATH; appended to sys.path"
    )
    num_reward_workers: int = Field(
        default_factory=lambda: max(1, (os.cpu_count() or 1) // 2),
        ge=1,
        description="Processes that run synchronous reward functions, one call at a time each",
    )
    worker_memory_mib: int = Field(default=8192, ge=256, description="Address space of one worker (RLIMIT_AS)")
    worker_open_files: int = Field(default=512, ge=32, description="Open files of one worker (RLIMIT_NOFILE)")
    max_inflight_groups: int = Field(default=64, ge=1, description="Groups of one run scored at a time")
    queue_timeout_s: float = Field(default=300.0, gt=0, description="Longest wait for a free worker, then `overload`")
    import_timeout_s: float = Field(default=60.0, gt=0, description="Deadline of importing a reward function's module")
    check_timeout_s: float = Field(default=15.0, gt=0, description="Deadline of POST /v1/rewards/check")
    poll_every_s: float = Field(default=0.25, gt=0, description="How often to look for runs")
    drain_s: float = Field(default=5.0, ge=0, description="How long running groups may finish after SIGTERM")

    # Generated code
    sandbox: Kind = Field(default="bubblewrap", description="Where generated code runs: bubblewrap, or docker")
    bwrap: str = Field(default="", description="Path of bubblewrap; looked up in PATH if empty")
    sandbox_python: str = Field(default="", description="Python for generated code in bubblewrap; found if empty")
    sandbox_image: str = Field(default=DEFAULT_IMAGE, description="Image with python3 for generated code in docker")

    def sandbox_choice(self) -> SandboxChoice:
        """Return the settings of the sandbox."""
        return SandboxChoice(self.sandbox, self.bwrap, self.sandbox_python, self.sandbox_image)

    @field_validator("reward_path", mode="before")
    @classmethod
    def _split_like_path(cls, raw: object) -> object:
        return tuple(part for part in raw.split(os.pathsep) if part) if isinstance(raw, str) else raw

    @field_validator("reward_path")
    @classmethod
    def _reward_directories_exist(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        missing = [str(path) for path in paths if not path.is_dir()]
        if missing:
            raise ValueError(f"{', '.join(missing)} is no directory; name existing ones, separated by '{os.pathsep}'")
        return tuple(path.resolve() for path in paths)
