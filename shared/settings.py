"""Settings every service reads, once, at its entry point.

Values come from ``HEADRACE_*`` environment variables; unknown keys in a constructor are refused. Secrets are SecretStr
and never printed.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.logs import LogFormat

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class ServiceSettings(BaseSettings):
    """What all three services share."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="forbid", frozen=True)

    redis_url: SecretStr = Field(default=SecretStr("redis://127.0.0.1:6379/0"))
    host: str = Field(default="127.0.0.1", description="Address the HTTP server binds to")
    port: int = Field(default=8000, ge=0, le=65535)
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics; 0 turns it off")
    api_key: SecretStr = Field(default=SecretStr(""), description="Bearer key of the public routes")
    internal_key: SecretStr = Field(default=SecretStr(""), description="Bearer key between the services")
    replica_id: str = Field(default="", description="Stable name of this replica; host name if empty")
    redis_patience_s: float = Field(
        default=60.0, gt=0, description="How long to wait for Redis at start; later waits are a minute"
    )
    log_level: str = Field(default="INFO")
    log_format: LogFormat = Field(default="json", description="json for machines, text for people")

    @model_validator(mode="after")
    def _a_reachable_service_has_keys(self) -> Self:
        if self.host not in _LOOPBACK and not (
            self.api_key.get_secret_value() and self.internal_key.get_secret_value()
        ):
            raise ValueError(
                f"binding to {self.host} makes this service reachable from other machines; "
                "set HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY first"
            )
        return self


def default_runs_dir() -> Path:
    """Return where runs are kept unless settings say otherwise."""
    return Path("runs").resolve()
