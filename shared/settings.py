"""Settings that every service reads, once, at its entry point.

Values come from ``HEADRACE_*`` environment variables; unknown keys in a constructor are refused. Secrets are SecretStr
and are never printed. Each may come from a file instead (secret_files.py).
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from shared.access.keyring import Keyring
from shared.errors import UserError
from shared.files.file_roots import FileRoots, default_roots, default_weight_roots, parse_roots
from shared.redis.redis_url import why_no_redis_url
from shared.service.child_secrets import SECRETS, in_memory, is_handed_on
from shared.service.logs import LogFormat, LogLevel
from shared.service.replica_name import replica_name
from shared.service.secret_files import password_of, read_secret, with_password, without_password
from shared.service.tls import ServerCertificate
from shared.serving.http_limits import KEEP_ALIVE_S, MAX_BODY_BYTES, HttpLimits, that_fit

_DEFAULT_PORT = 8000
_DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})

_Settings = TypeVar("_Settings", bound=BaseSettings)


class ServiceSettings(BaseSettings):
    """Settings that all services share."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="forbid", frozen=True)

    takes_internal_key: ClassVar[bool] = True
    """Whether the service has routes for the other services, or calls theirs."""

    redis_url: SecretStr = Field(
        default=SecretStr(_DEFAULT_REDIS_URL),
        description="redis://[USER:PASSWORD@]HOST:PORT/0, or rediss:// for TLS",
    )
    redis_password_file: Path | None = Field(default=None, description="File with the password of redis_url")
    host: str = Field(default="127.0.0.1", description="Address the HTTP server binds to")
    port: int = Field(default=_DEFAULT_PORT, ge=0, le=65535, description="Port of the HTTP server; 0: a free one")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics; 0 turns it off")
    api_key: SecretStr = Field(default=SecretStr(""), description="Bearer key of the public routes")
    api_key_file: Path | None = Field(default=None, description="File with the API key, instead of the key")
    api_keys_file: Path | None = Field(
        default=None, description="File with named keys and their scopes, read again when it changes"
    )
    internal_key: SecretStr = Field(default=SecretStr(""), description="Bearer key between the services")
    internal_key_file: Path | None = Field(default=None, description="File with the internal key, instead of the key")
    tls_cert_file: Path | None = Field(
        default=None, description="Certificate of the HTTP server, with its chain; read again when it changes"
    )
    tls_key_file: Path | None = Field(default=None, description="Key of that certificate")
    tls_ca_file: Path | None = Field(
        default=None, description="Certificates of the CAs that are trusted when other services are called over https"
    )
    data_roots: str = Field(
        default="",
        description="Directories below which runs may name models and data sets, separated like PATH; if empty, all "
        "that are not the operating system's",
    )
    weight_roots: str = Field(
        default="",
        description="The same for weight_dir; may have URLs such as s3://bucket/weights",
    )
    replica_id: str = Field(
        default="",
        description="Stable name of this replica; if empty, its container's, or its host's and the port if that is not "
        f"{_DEFAULT_PORT}",
    )
    redis_patience_s: float = Field(
        default=60.0, gt=0, description="How long to wait for Redis at start; later waits are a minute"
    )
    request_head_timeout_s: float = Field(
        default=10.0, gt=0, description="Deadline of a request's head, and of a TLS handshake; then 408"
    )
    request_body_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a request's body; then 408")
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="How long a client may read nothing of its answer; then it is cut off"
    )
    keep_alive_s: int = Field(default=KEEP_ALIVE_S, ge=1, description="How long a connection is kept without a request")
    max_connections: int = Field(
        default=4096,
        ge=8,
        description="Most open connections; one more closes an idle one. At most 5/8 of the limit of open files",
    )
    max_requests: int = Field(
        default=1024, ge=1, description="Most requests in progress, without /livez and /readyz; one more gets a 503"
    )
    log_level: LogLevel = Field(default="INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL")
    log_format: LogFormat = Field(default="json", description="json for machines, text for people")

    @model_validator(mode="before")
    @classmethod
    def _secrets_are_read_from_their_files(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # An empty variable means no file. As a path it would be the working directory.
        values = {
            name: None if name.endswith("_file") and value == "" else value
            for name, value in cast("dict[str, Any]", given).items()
        }
        for name in ("api_key", "internal_key"):
            if path := values.get(f"{name}_file"):
                variable = f"HEADRACE_{name.upper()}"
                if values.get(name):
                    raise ValueError(f"both {variable} and {variable}_FILE are set; keep one of them")
                values[name] = read_secret(Path(path), variable=f"{variable}_FILE")
        if path := values.get("redis_password_file"):
            url = values.get("redis_url", _DEFAULT_REDIS_URL)
            bare = url.get_secret_value() if isinstance(url, SecretStr) else str(url)
            values["redis_url"] = with_password(bare, read_secret(Path(path), variable="HEADRACE_REDIS_PASSWORD_FILE"))
        return values

    @field_validator("api_key", "internal_key")
    @classmethod
    def _keys_are_one_word(cls, key: SecretStr) -> SecretStr:
        if re.search(r"\s", key.get_secret_value()):
            raise ValueError("a key has no spaces: `openssl rand -hex 32` makes one")
        return key

    @field_validator("redis_url")
    @classmethod
    def _redis_can_be_there(cls, url: SecretStr) -> SecretStr:
        if reason := why_no_redis_url(url.get_secret_value()):
            raise ValueError(reason)
        return url

    @field_validator("data_roots", "weight_roots")
    @classmethod
    def _roots_are_places(cls, text: str) -> str:
        parse_roots(text)
        return text

    @property
    def name(self) -> str:
        """Stable name of this replica, under which a restarted replica finds its unfinished work."""
        return self.replica_id or replica_name(port=None if self.port in (0, _DEFAULT_PORT) else self.port)

    def places_of_data(self) -> FileRoots:
        """Return the directories below which runs may name models and data sets."""
        named = parse_roots(self.data_roots)
        return FileRoots(named or default_roots(), "HEADRACE_DATA_ROOTS", is_default=not named)

    def places_of_weights(self) -> FileRoots:
        """Return the directories and URLs below which runs may have weights written (``weight_dir``)."""
        named = parse_roots(self.weight_roots)
        return FileRoots(named or default_weight_roots(), "HEADRACE_WEIGHT_ROOTS", is_default=not named)

    @model_validator(mode="after")
    def _a_reachable_service_has_keys(self) -> Self:
        has_public = self.api_key.get_secret_value() or self.api_keys_file is not None
        has_internal = self.internal_key.get_secret_value() or not self.takes_internal_key
        if self.host not in _LOOPBACK and not (has_public and has_internal):
            names = ["HEADRACE_API_KEY", *(["HEADRACE_INTERNAL_KEY"] if self.takes_internal_key else [])]
            raise ValueError(
                f"binding to {self.host} makes this service reachable from other machines; "
                f"set {' and '.join(names)} first, or {' and '.join(f'{name}_FILE' for name in names)}"
            )
        return self

    @model_validator(mode="after")
    def _metrics_have_a_port_of_their_own(self) -> Self:
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError(f"HEADRACE_METRICS_PORT and HEADRACE_PORT are both {self.port}; set two different ports")
        return self

    @model_validator(mode="after")
    def _a_certificate_has_its_key(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing = "KEY" if self.tls_key_file is None else "CERT"
            raise ValueError(f"HEADRACE_TLS_{missing}_FILE is not set, and a certificate and its key belong together")
        return self

    @property
    def scheme(self) -> str:
        """``http``, or ``https`` if this service has a certificate."""
        return "http" if self.tls_cert_file is None else "https"

    def certificate(self) -> ServerCertificate | None:
        """Return this service's certificate; None if it serves plain HTTP.

        Raises:
            UserError: The files of the certificate cannot be used.
        """
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return ServerCertificate(self.tls_cert_file, self.tls_key_file)

    def keyring(self) -> Keyring:
        """Return the keys that this service accepts.

        Raises:
            UserError: The keys file cannot be used.
        """
        return Keyring(
            api=self.api_key.get_secret_value(),
            internal=self.internal_key.get_secret_value(),
            file=self.api_keys_file,
        )

    @model_validator(mode="after")
    def _there_are_connections_for_the_requests(self) -> Self:
        if self.max_requests > self.max_connections * 3 // 4:
            raise ValueError(
                f"HEADRACE_MAX_REQUESTS={self.max_requests} is more than three quarters of HEADRACE_MAX_CONNECTIONS="
                f"{self.max_connections}: probes could not connect while so many are in progress. Raise the latter to "
                f"{-(-self.max_requests * 4 // 3)}"
            )
        return self

    def http_limits(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> HttpLimits:
        """Return the limits for clients. Also raises the process's limit of open files to fit."""
        return that_fit(
            HttpLimits(
                head_timeout_s=self.request_head_timeout_s,
                body_timeout_s=self.request_body_timeout_s,
                send_timeout_s=self.send_timeout_s,
                keep_alive_s=self.keep_alive_s,
                max_connections=self.max_connections,
                max_requests=self.max_requests,
                max_body_bytes=max_body_bytes,
            )
        )

    def secrets_of_a_child(self) -> dict[str, str]:
        """Return variables that give a child process the internal key and access to Redis, but no key of users.

        They contain no secret. A secret from a file stays there, and all others are put into files in this process's
        memory. The only exception is a Redis password with spaces, which stays in the URL.
        """
        key, file = self.internal_key.get_secret_value(), _lasting(self.internal_key_file)
        variables = dict.fromkeys(SECRETS, "")
        # The child serves no client. On loopback it needs no key for them.
        variables["HEADRACE_HOST"] = "127.0.0.1"
        variables["HEADRACE_INTERNAL_KEY_FILE"] = str(file.absolute()) if file else in_memory(key) if key else ""
        url, file = self.redis_url.get_secret_value(), _lasting(self.redis_password_file)
        password = password_of(url)
        if len(password.split()) > 1:  # a secret file may not contain spaces
            return variables | {"HEADRACE_REDIS_URL": url}
        variables["HEADRACE_REDIS_URL"] = without_password(url)
        variables["HEADRACE_REDIS_PASSWORD_FILE"] = (
            str(file.absolute()) if file else in_memory(password) if password else ""
        )
        return variables


class AdvertisedSettings(ServiceSettings):
    """Settings of a service whose replicas are reached one by one, each at its own URL."""

    advertise_url: str = Field(
        default="",
        description="URL at which others reach this replica; if empty, host (machine's name for 0.0.0.0) and port",
    )

    @model_validator(mode="after")
    def _it_is_advertised_as_what_it_speaks(self) -> Self:
        if "@" in self.advertise_url:
            raise ValueError("HEADRACE_ADVERTISE_URL: the address of a service has no user and no password")
        if self.advertise_url and not self.advertise_url.startswith(f"{self.scheme}://"):
            raise ValueError(
                f"advertise_url={self.advertise_url}, but this replica speaks {self.scheme}: with "
                "HEADRACE_TLS_CERT_FILE it must begin with https://, otherwise with http://"
            )
        return self

    def url(self, port: int) -> str:
        """Return the URL at which others reach this replica, which listens on ``port``."""
        if self.advertise_url:
            return self.advertise_url
        host = socket.gethostname() if self.host in _EVERY_ADDRESS else self.host
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _lasting(file: Path | None) -> Path | None:
    """Return the path; None if it is an inherited open file, which is closed once the settings have been read."""
    return None if file is None or is_handed_on(str(file)) else file


def from_environment(kind: type[_Settings]) -> _Settings:
    """Read the settings from the environment variables of this process.

    Raises:
        UserError: Variables are wrong. The message has a line for each, with its name and never its value.
    """
    prefix = kind.model_config.get("env_prefix", "")
    # Not `from error`: pydantic's message contains the values, and so the secrets.
    try:
        return kind()
    except ValidationError as error:
        raise UserError("\n".join(_sentences(error, prefix))) from None
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        if field is None:
            raise
        raise UserError(f"{prefix}{field[1].upper()}: not JSON ({error.__cause__})") from None


def _sentences(error: ValidationError, prefix: str) -> Iterator[str]:
    for item in error.errors(include_url=False, include_input=False):
        message = item["msg"].removeprefix("Value error, ")
        variable, *inside = [str(part) for part in item["loc"]] or [""]
        where = ", ".join([f"{prefix}{variable.upper()}", *inside])
        yield f"{where}: {message}" if variable else message


def default_runs_dir() -> Path:
    """Return the absolute path of the default directory for runs: ``runs`` in the working directory."""
    return Path("runs").resolve()
