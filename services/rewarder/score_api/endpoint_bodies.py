"""Request and response bodies of the routes for reward endpoints."""

from typing import Literal

from pydantic import Field

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.score_api.bodies import OutcomeBody, RewardFunctionInfo, Rows, Text
from services.rewarder.strict_body import Body

_MAX_ROWS = 1024


class RegisterRequest(EndpointSpec):
    """A request to register an endpoint: its specification and its name."""

    name: str = Field(description="The name that runs use: lower-case letters, digits, '_' and '-'")
    replace: bool = Field(default=False, description="Replace another endpoint of this name")

    def spec(self) -> EndpointSpec:
        """Return the specification, without the name."""
        return EndpointSpec.model_validate(self.model_dump(exclude={"name", "replace"}))


class EndpointState(Body):
    """An endpoint's state at the rewarder that answers: its circuit breaker, and its numbers of requests."""

    breaker: Literal["closed", "half-open", "open"]
    detail: str = Field(description="Why no requests are sent to it now; empty if they are")
    requests_in_flight: int
    requests_queued: int


class RewardDetails(RewardFunctionInfo):
    """A built-in function, or an endpoint with its specification and state."""

    version: str = Field(default="", description="The version of the specification, as in outcomes")
    endpoint: EndpointSpec | None = None
    state: EndpointState | None = None


class TrialRequest(Rows):
    """Prompts and completions to call an endpoint with. The defaults are an example."""

    prompts: list[Text] = Field(default=["What is 6 times 7?"] * 2, min_length=1, max_length=_MAX_ROWS)
    completions: list[Text] = Field(default=["6 times 7 is 42.", "It is 41."], max_length=_MAX_ROWS)


class SentRequest(Body):
    """The request that was sent, with its secrets removed."""

    url: str
    headers: dict[str, str]
    body: str


class ReceivedAnswer(Body):
    """The endpoint's HTTP answer, with secrets removed and long texts cut."""

    status: int
    headers: dict[str, str]
    body: str


class ExchangeBody(Body):
    """One request of a trial and its answer. ``error`` says why there is no usable answer; empty if there is one."""

    request: SentRequest | None
    answer: ReceivedAnswer | None
    error: str
    latency_s: float


class TrialReply(Body):
    """All requests of a trial, and one outcome per completion."""

    exchanges: list[ExchangeBody]
    outcomes: list[OutcomeBody]
