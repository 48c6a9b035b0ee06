"""The specification of a reward endpoint, as a user registers it: URL, wire format, headers and limits.

It never holds a secret: a header names a secret, and only the rewarder has its value (secret_files.py). A wire format
with options has a section here, with the name of the format.
"""

import hashlib
import json
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.rewarder.built_ins.built_in_rewards import ALIASES, BUILT_INS
from services.rewarder.endpoints.judge_options import JudgeOptions
from services.rewarder.endpoints.transport.outbound_rules import MAX_URL_CHARACTERS
from services.rewarder.endpoints.transport.secret_files import SECRET_NAME
from services.rewarder.endpoints.transport.signing import SIGNATURE_HEADER, TIMESTAMP_HEADER
from services.rewarder.strict_body import Body
from services.rewarder.token_estimate import CHARACTERS_PER_TOKEN
from shared.user_code.module_sources import VERSION_CHARACTERS

NAME = r"[a-z0-9][a-z0-9_-]{0,63}"
MAX_HEADERS = 32
Scope = Literal["runs", "score"]
WireFormatName = Literal["headrace", "trl", "openrlhf", "openai_judge"]
SECTIONS: tuple[WireFormatName, ...] = ("openrlhf", "openai_judge")
"""The wire formats that have options, in a field with the name of the format."""

_RESERVED_NAMES = frozenset({"check"})
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
OURS = frozenset(
    {
        "host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "keep-alive",
        "upgrade", "te", "trailer", "expect", "accept", "accept-encoding", "idempotency-key", "proxy-authorization",
        "proxy-connection", "cookie", TIMESTAMP_HEADER, SIGNATURE_HEADER,
    }
)  # fmt: skip
"""Headers that a specification cannot set: the rewarder sets them itself, or never sends them."""
CARRIES_A_SECRET = re.compile(r"auth|key|token|secret|passw|signature|credential", re.IGNORECASE)
"""Matches names of headers and query parameters that hold secrets, whose values must not be in a specification."""

SecretName = Annotated[str, Field(pattern=f"^{SECRET_NAME}$")]


class SecretHeader(Body):
    """A header whose value is ``prefix`` followed by a secret of the rewarder."""

    secret: SecretName
    prefix: str = Field(default="", max_length=100, description="Sent before the secret, such as 'Bearer '")


class OpenRlhfOptions(Body):
    """The options of the wire format ``openrlhf``: the data set column that is sent as labels."""

    label_column: str | None = Field(
        default=None, max_length=200, description="Data set column sent as `labels`; without it every label is ''"
    )


class EndpointSpec(Body):
    """The specification of a reward endpoint: its URL, wire format, headers, deadline and limits."""

    url: str = Field(max_length=MAX_URL_CHARACTERS, description="https://, or http:// to a host the operator allows")
    wire_format: WireFormatName = Field(default="headrace", description="The format of requests and answers")
    summary: str = Field(default="", max_length=300, description="A description in one line")
    scopes: list[Scope] = Field(
        default=["runs", "score"], min_length=1, description="Where it may be used: in runs, and in POST /v1/score"
    )
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=600,
        description="Deadline of a request with its retries, in seconds; the run's own deadline applies too",
    )
    max_retries: int = Field(
        default=2, ge=0, le=10, description="Retries after connection errors, 429, 502, 503 and 504"
    )
    batch_size: int | None = Field(
        default=None, ge=1, le=4096, description="Completions per request; null is the whole group"
    )
    max_concurrency: int = Field(default=16, ge=1, le=1024, description="Requests at a time from one rewarder")
    max_queued: int = Field(
        default=10_000, ge=0, le=1_000_000, description="Requests that may wait for their turn; more are `overload`"
    )
    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000, description="From one rewarder")
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12, description="From one rewarder, estimated")
    headers: dict[str, str | SecretHeader] = Field(default={}, max_length=MAX_HEADERS)
    signing_secret: SecretName | None = Field(default=None, description="Secret that bodies are signed with")
    send_completion_ids: bool = Field(default=True, description="Send token ids where the wire format has them")
    breaker_failures: int = Field(
        default=5, ge=1, le=1000, description="Failures in a row, after which it is not called for a while"
    )
    breaker_pause_s: float = Field(
        default=30.0, gt=0, le=3600, description="How long it is not called then, in seconds"
    )
    openrlhf: OpenRlhfOptions | None = Field(default=None, description="Options of the wire format openrlhf")

    openai_judge: JudgeOptions | None = Field(
        default=None, description="Model and rubric of the wire format openai_judge"
    )

    @field_validator("headers")
    @classmethod
    def _headers_are_headers(cls, headers: dict[str, str | SecretHeader]) -> dict[str, str | SecretHeader]:
        lowered: dict[str, str | SecretHeader] = {}
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError("a header's name has letters, digits and '-', at most 100 of them")
            if name.lower() in OURS:
                raise ValueError(f"{name} cannot be set: the rewarder sets it itself, or never sends it")
            if isinstance(value, str) and CARRIES_A_SECRET.search(name):
                raise ValueError(
                    f"the value of {name} would be visible to all users; put it into a secret of the rewarder and "
                    'name that: {"secret": "judge-key", "prefix": "Bearer "}'
                )
            if name.lower() in lowered:
                raise ValueError(f"{name} occurs twice")
            text = value if isinstance(value, str) else value.prefix
            if len(text) > 2000 or not _HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the value of {name} must be printable ASCII, at most 2000 characters of it")
            if text.startswith(" ") or (isinstance(value, str) and text.endswith(" ")):
                raise ValueError(f"the value of {name} begins or ends with a space, which no header can carry")
            lowered[name.lower()] = value
        return lowered

    @model_validator(mode="after")
    def _only_the_section_of_its_wire_format(self) -> Self:
        wrong = [section for section in SECTIONS if section != self.wire_format and getattr(self, section) is not None]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} is only for the wire format of that name, and wire_format is {self.wire_format}"
            )
        return self

    @model_validator(mode="after")
    def _a_judge_has_a_rubric(self) -> Self:
        if self.wire_format == "openai_judge" and self.openai_judge is None:
            raise ValueError(
                'wire_format openai_judge needs "openai_judge": {"model", "rubric", "min_score", "max_score"}'
            )
        return self

    @property
    def version(self) -> str:
        """The first digits of a SHA-256 of all fields with non-default values. Equal specifications share a version."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:VERSION_CHARACTERS]

    @property
    def num_tokens_beside(self) -> int:
        """The estimated tokens of the judge's rubric, system prompt and answer; 0 for the other wire formats."""
        judge = self.openai_judge
        if judge is None:
            return 0
        return (len(judge.rubric) + len(judge.system_prompt)) // CHARACTERS_PER_TOKEN + (judge.max_tokens or 0)

    @property
    def secret_names(self) -> list[str]:
        """The names of the secrets that a request to the endpoint needs."""
        named = [value.secret for value in self.headers.values() if isinstance(value, SecretHeader)]
        return named + ([self.signing_secret] if self.signing_secret is not None else [])


def why_no_name(name: str) -> str | None:
    """Return the reason why an endpoint cannot have the name ``name``, or None if it can."""
    if not re.fullmatch(NAME, name):
        return (
            "an endpoint's name has lower-case letters, digits, '_' and '-', begins with a letter or digit, and has at "
            "most 64 characters"
        )
    if name in BUILT_INS or name in ALIASES:
        return f"'{name}' is a built-in reward; choose another name"
    return f"'{name}' is the name of a route; choose another name" if name in _RESERVED_NAMES else None
