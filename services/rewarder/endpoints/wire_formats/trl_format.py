"""The wire format ``trl``: sends the arguments of a TRL reward function as a JSON object, and reads a list of rewards.

    {"prompts": [...], "completions": [...], "completion_ids": [...], "answer": [...], "trainer_state": {...}}
    -->
    [1.0, null, 0.5]   or   {"rewards": [1.0, null, 0.5]}          null is not applicable

TRL defines a function, not a wire format. The JSON object follows the signature of that function: every data set column
has a field with its name. In a run with environments, ``environments`` are objects with their public attributes.
"""

from typing import Any, cast

import msgspec

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.wire_format import (
    InvalidAnswerError,
    RequestContext,
    WireRequest,
    parse_json,
)
from services.rewarder.reward_call import NOT_COLUMNS, RewardCall, Verdict, judge, with_objects


class TrlFormat:
    """Writes the arguments of a TRL reward function as JSON, and reads a list of rewards."""

    max_batch: int | None = None

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return an empty list: the columns that the endpoint reads are not known."""
        return []

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Accept every call, because this format needs no particular column."""

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return a request with the keyword arguments of a TRL reward function as a JSON object."""
        body: dict[str, Any] = {name: column for name, column in call.columns.items() if name not in NOT_COLUMNS}
        completions = [with_objects(completion) for completion in call.completions]
        body |= {"prompts": call.prompts, "completions": completions, "trainer_state": call.trainer_state.known()}
        if call.completion_ids is not None and spec.send_completion_ids:
            body["completion_ids"] = call.completion_id_lists()
        if call.environments is not None:
            body["environments"] = [environment.attributes for environment in call.environments]
        return WireRequest(msgspec.json.encode(body))

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return the verdicts, by the same rules as for Python reward functions."""
        answer: object = parse_json(body)
        rewards = answer
        if isinstance(answer, dict):
            found = cast("dict[str, object]", answer)
            if "rewards" not in found:
                raise InvalidAnswerError("the answer is neither a list nor an object with rewards")
            rewards = found["rewards"]
        return judge(rewards, len(call.completions))
