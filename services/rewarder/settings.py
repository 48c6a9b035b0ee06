"""Settings of the rewarder, read once from ``HEADRACE_*`` variables."""

import os
import ssl
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.rewarder.endpoints.transport.outbound_rules import OutboundRules, parse_hosts, parse_networks, parse_ports
from services.rewarder.python_functions.rate_limits import CallLimits, check_names, read_limits
from services.rewarder.sandbox.chosen import DEFAULT_IMAGE, Kind, SandboxChoice
from shared.settings import ServiceSettings
from shared.user_code.places import Places, parse_modules

MIB = 1024 * 1024


class SandboxSettings(BaseSettings):
    """Settings of the sandbox in which generated code runs."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="forbid", frozen=True)

    sandbox: Kind = Field(default="bubblewrap", description="Where generated code runs: bubblewrap, or docker")
    bwrap: str = Field(default="", description="Path of bubblewrap; looked up in PATH if empty")
    sandbox_python: str = Field(
        default="", description="Python for generated code in bubblewrap; found automatically if empty"
    )
    sandbox_image: str = Field(default=DEFAULT_IMAGE, description="Image with python3 for generated code in docker")

    def choice_for(self, num_workers: int) -> SandboxChoice:
        """Return the sandbox settings for each of ``num_workers`` worker processes, which share the processors."""
        return SandboxChoice(self.sandbox, self.bwrap, self.sandbox_python, self.sandbox_image, num_workers)


class WorkerSettings(SandboxSettings):
    """Settings of the worker processes that run reward functions, including those of `headrace rewards check`."""

    worker_memory_mib: int = Field(default=8192, ge=256, description="Address space of one worker (RLIMIT_AS)")
    worker_open_files: int = Field(default=512, ge=32, description="Open files of one worker (RLIMIT_NOFILE)")
    import_timeout_s: float = Field(default=60.0, gt=0, description="Deadline of importing a reward function's module")


class RewarderSettings(WorkerSettings, ServiceSettings):
    """The rewarder's own settings, in addition to the settings of all services."""

    takes_internal_key: ClassVar[bool] = False

    reward_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(), description="Directories with users' reward modules, separated like PATH; appended to sys.path"
    )
    reward_modules: str = Field(
        default="",
        description="Installed modules whose functions may be rewards, each with its submodules, separated by commas",
    )
    num_reward_workers: int = Field(
        default_factory=lambda: max(1, (os.cpu_count() or 1) // 2),
        ge=1,
        description="Processes that run synchronous reward functions, one call at a time each",
    )
    max_inflight_groups: int = Field(default=64, ge=1, description="Groups of one run scored at a time")
    queue_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest wait while no worker gets free, then `overload`",
    )
    check_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="Deadline of POST /v1/rewards/check; less than the trainer's HEADRACE_REWARD_CHECK_TIMEOUT_S",
    )
    poll_every_s: float = Field(default=0.25, gt=0, description="Seconds between two looks for runs")
    drain_s: float = Field(default=5.0, ge=0, description="How long groups in flight may finish after SIGTERM")
    reward_reload_every_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds between two looks for edits of reward modules; 0 to read edits only at checks",
    )
    reward_model_device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto is cuda if there is a GPU, else cpu"
    )
    reward_model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of reward models; auto is the one they were saved in"
    )
    reward_model_max_batch_tokens: int = Field(
        default=16384, ge=1, description="Tokens of one forward pass of a reward model, with padding"
    )
    reward_model_max_loaded: int = Field(default=2, ge=1, description="Reward models in memory at a time")
    reward_model_load_timeout_s: float = Field(
        default=600.0, gt=0, description="Deadline of fetching and loading a reward model"
    )

    reward_allowed_hosts: str = Field(
        default="",
        description="Hosts of reward endpoints that may be internal, separated by commas: name, name:port, name:*, "
        "*.domain",
    )
    reward_allowed_networks: str = Field(
        default="", description="Networks that reward endpoints may be in, separated by commas"
    )
    reward_allowed_ports: str = Field(default="80,443", description="Ports of reward endpoints, such as 443,8000-8999")
    reward_secrets_dir: Path | None = Field(
        default=None, description="Directory with one file per secret for endpoints"
    )
    reward_ca_file: Path | None = Field(default=None, description="CA certificates that endpoints are verified with")
    reward_max_answer_bytes: int = Field(
        default=MIB, ge=1024, description="Longest answer of an endpoint; a longer one is `invalid`"
    )

    def outbound_rules(self) -> OutboundRules:
        """Return the rules for the URLs of reward endpoints; raises ValueError if a setting cannot be parsed."""
        return OutboundRules(
            hosts=parse_hosts(self.reward_allowed_hosts),
            networks=parse_networks(self.reward_allowed_networks),
            ports=parse_ports(self.reward_allowed_ports),
        )

    reward_limits: Annotated[dict[str, CallLimits], NoDecode] = Field(
        default={}, description='JSON: limits of Python functions by name, such as {"my_rewards:judge": {...}}'
    )
    max_inflight_requests: int = Field(
        default=64, ge=1, description="Requests that score, check or test rewards and are handled at a time"
    )
    max_queued_requests: int = Field(default=256, ge=0, description="Such requests that may wait; more get a 429")

    @field_validator("reward_limits", mode="before")
    @classmethod
    def _limits_are_json(cls, raw: object) -> object:
        return read_limits(raw)

    @field_validator("reward_limits")
    @classmethod
    def _limits_are_of_functions(cls, limits: dict[str, CallLimits]) -> dict[str, CallLimits]:
        check_names(limits)
        return limits

    def reward_places(self) -> Places:
        """Return the directories and installed modules that reward functions may be imported from."""
        return Places(tuple(map(str, self.reward_path)), parse_modules(self.reward_modules))

    def sandbox_choice(self) -> SandboxChoice:
        """Return the sandbox settings for each of this rewarder's worker processes."""
        return self.choice_for(self.num_reward_workers)

    @field_validator("reward_path", mode="before")
    @classmethod
    def _split_like_path(cls, raw: object) -> object:
        return tuple(part for part in raw.split(os.pathsep) if part) if isinstance(raw, str) else raw

    @field_validator("reward_allowed_hosts", "reward_allowed_networks", "reward_allowed_ports")
    @classmethod
    def _what_is_allowed_can_be_read(cls, text: str, info: ValidationInfo) -> str:
        {"hosts": parse_hosts, "networks": parse_networks, "ports": parse_ports}[str(info.field_name).split("_")[-1]](
            text
        )
        return text

    @field_validator("reward_ca_file")
    @classmethod
    def _the_certificates_can_be_read(cls, path: Path | None) -> Path | None:
        try:
            if path is not None:
                ssl.create_default_context(cafile=str(path))
        except OSError as error:  # SSLError is an OSError
            raise ValueError(f"{path} does not hold certificates that can be read") from error
        return path

    @field_validator("reward_secrets_dir")
    @classmethod
    def _the_secrets_are_in_a_directory(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_dir():
            raise ValueError(f"{path} is not a directory; name one with one file per secret")
        return path

    @field_validator("reward_modules")
    @classmethod
    def _modules_can_be_named(cls, text: str) -> str:
        parse_modules(text)
        return text

    @field_validator("reward_path")
    @classmethod
    def _reward_directories_exist(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        missing = [str(path) for path in paths if not path.is_dir()]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} is not a directory; name existing ones, separated by '{os.pathsep}'"
            )
        return tuple(path.resolve() for path in paths)
