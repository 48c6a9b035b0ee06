"""Bodies of the routes for reward endpoints."""

from typing import Literal

from pydantic import Field

from services.rewarder.bodies import Body, OutcomeBody, RewardFunctionInfo, Rows, Text
from services.rewarder.endpoints.spec import EndpointSpec

_MAX_ROWS = 1024


class RegisterRequest(EndpointSpec):
    """An endpoint, and what it shall be called."""

    name: str = Field(description="What runs call it: lower-case letters, digits, '_' and '-'")
    replace: bool = Field(default=False, description="Take the place of another endpoint of that name")

    def spec(self) -> EndpointSpec:
        """Return what is registered under the name."""
        return EndpointSpec.model_validate(self.model_dump(exclude={"name", "replace"}))


class EndpointState(Body):
    """How one rewarder sees the endpoint now."""

    breaker: Literal["closed", "half-open", "open"]
    detail: str = Field(description="Why nothing is sent to it now; empty if something is")
    requests_in_flight: int
    requests_queued: int


class RewardDetails(RewardFunctionInfo):
    """A built-in function, or an endpoint with what was registered."""

    version: str = Field(default="", description="Of the specification; outcomes carry it")
    endpoint: EndpointSpec | None = None
    state: EndpointState | None = None


class TrialRequest(Rows):
    """Rows to try an endpoint with; without any, an example is sent."""

    prompts: list[Text] = Field(default=["What is 6 times 7?"] * 2, min_length=1, max_length=_MAX_ROWS)
    completions: list[Text] = Field(default=["6 times 7 is 42.", "It is 41."], max_length=_MAX_ROWS)


class SentRequest(Body):
    """What was sent, without secrets."""

    url: str
    headers: dict[str, str]
    body: str


class ReceivedAnswer(Body):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: str


class ExchangeBody(Body):
    """One request of a trial. ``error`` says why there is no answer, or what is wrong with it."""

    request: SentRequest | None
    answer: ReceivedAnswer | None
    error: str
    latency_s: float


class TrialReply(Body):
    """Every request of a trial, and the outcomes they lead to, one a completion."""

    exchanges: list[ExchangeBody]
    outcomes: list[OutcomeBody]
