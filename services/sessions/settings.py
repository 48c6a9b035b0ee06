"""Settings of the sessions service, read once from ``HEADRACE_*`` variables."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.sessions.origins import origin_of
from shared.settings import AdvertisedSettings
from shared.user_code.limits import Limits
from shared.user_code.places import Places, parse_modules


class SessionsSettings(AdvertisedSettings):
    """Settings of the sessions service, in addition to the settings that all services have."""

    tls_generator_name: str = Field(
        default="",
        description="Name that generators' certificates must be for; if empty, the host of each one's address",
    )
    tool_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Directories with users' tools and environments, separated like PATH; appended to sys.path",
    )
    tool_modules: str = Field(
        default="",
        description="Installed modules whose functions may be tools or environments, each with its submodules, "
        "separated by commas",
    )
    mcp_config: Path | None = Field(
        default=None, description="JSON file with the MCP servers that runs may name, in the format of .mcp.json"
    )
    num_tool_workers: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="Processes that run tools, one call at a time each; they start with the first run that has tools",
    )
    num_agent_workers: int = Field(
        default=16,
        ge=1,
        description="Processes that run agent programs in Python, one rollout at a time each; they start with the "
        "first run that has one",
    )
    agent_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins of the agent programs that runs may name by URL, such as http://agents:9000, separated by "
        "commas",
    )
    environment_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins of the OpenEnv servers that runs may name by URL, such as http://envs:8000, separated by "
        "commas",
    )
    max_open_sessions: int = Field(
        default=256, ge=1, description="Most sessions opened over HTTP at a time; one more gets a 429"
    )
    worker_memory_mib: int = Field(
        default=8192, ge=256, description="Address space of one worker or environment (RLIMIT_AS)"
    )
    worker_open_files: int = Field(
        default=512, ge=32, description="Open files of one worker or environment (RLIMIT_NOFILE)"
    )
    max_inflight_groups: int = Field(default=64, ge=1, description="Groups of one run played at a time")
    max_environments: int = Field(
        default=256,
        ge=1,
        description="Environments of one run at a time, each in a process of its own, or in a session of an OpenEnv "
        "server; further rollouts wait",
    )
    queue_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest wait of a tool call while no worker gets free, or for an OpenEnv server that has no free "
        "session; then the rollout is lost",
    )
    import_timeout_s: float = Field(default=60.0, gt=0, description="Deadline of importing a tool's module")
    check_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="Deadline of POST /v1/tools/check; less than the trainer's HEADRACE_TOOL_CHECK_TIMEOUT_S",
    )
    poll_every_s: float = Field(default=0.25, gt=0, description="Seconds between two looks for runs")

    @property
    def name(self) -> str:
        """The replica's name. The default begins with "sessions-", because generators' leases are in the same set."""
        return self.replica_id or f"sessions-{super().name}"

    def limits(self) -> Limits:
        """Return the limits of memory and open files for each process that runs users' code."""
        return Limits(self.worker_memory_mib * 1024 * 1024, self.worker_open_files)

    def places(self) -> Places:
        """Return the directories and modules from which users' tools, environments and agents may be imported."""
        return Places(
            tuple(map(str, self.tool_path)), parse_modules(self.tool_modules), role="tool", service="sessions service"
        )

    @field_validator("agent_origins", "environment_origins", mode="before")
    @classmethod
    def _split_at_commas(cls, raw: object) -> object:
        return tuple(part.strip() for part in raw.split(",") if part.strip()) if isinstance(raw, str) else raw

    @field_validator("agent_origins", "environment_origins")
    @classmethod
    def _they_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(origin_of, origins))

    @field_validator("tool_path", mode="before")
    @classmethod
    def _split_like_path(cls, raw: object) -> object:
        return tuple(part for part in raw.split(os.pathsep) if part) if isinstance(raw, str) else raw

    @field_validator("tool_path")
    @classmethod
    def _tool_directories_exist(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        missing = [str(path) for path in paths if not path.is_dir()]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} is not a directory; name existing ones, separated by '{os.pathsep}'"
            )
        return tuple(path.resolve() for path in paths)

    @field_validator("tool_modules")
    @classmethod
    def _modules_can_be_named(cls, text: str) -> str:
        parse_modules(text)
        return text
