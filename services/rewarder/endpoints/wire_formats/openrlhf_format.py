"""The wire format ``openrlhf``: OpenRLHF's ``remote_rm_url``. Reward servers written for OpenRLHF work unchanged.

    {"query": [prompt + completion, ...], "prompts": [...], "labels": [...]}
    -->
    {"rewards": [0.5, ...], "scores": [...], "extra_logs": {"name": [...]}}

The rewards are read from ``rewards``, or from ``scores`` if ``rewards`` is missing. Lists in ``extra_logs`` become
components. OpenRLHF renders a conversation with its chat template. The rewarder does not have a tokenizer and joins the
contents of the messages with an empty line.
"""

from typing import Any, cast

import msgspec

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.wire_format import (
    MAX_COMPONENTS,
    InvalidAnswerError,
    RequestContext,
    WireRequest,
    as_object,
    component_name,
    finite,
    parse_json,
)
from services.rewarder.reward_call import CallError, RewardCall, Verdict, judge
from shared.chat_text import chat_text
from shared.messages import Completion

_BETWEEN_MESSAGES = "\n\n"


class OpenRlhfFormat:
    """Writes requests and reads answers in the format of OpenRLHF's ``remote_rm_url``."""

    max_batch: int | None = None

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return the data set column that is sent as labels, if the specification names one."""
        column = _label_column(spec)
        return [] if column is None else [[column]]

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Refuse a call that lacks the data set column that is sent as labels; raises CallError."""
        column = _label_column(spec)
        if column is not None and column not in call.columns:
            columns = ", ".join(sorted(call.columns)) or "none"
            raise CallError(f"needs the column '{column}' for its labels; the columns are: {columns}")

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return a request with the prompts, the labels, and the queries: each prompt followed by its completion."""
        column = _label_column(spec)
        labels: list[Any] = [""] * len(call.completions) if column is None else call.columns[column]
        prompts = [_text(prompt) for prompt in call.prompts]
        queries = [
            prompt + (completion if isinstance(completion, str) else _BETWEEN_MESSAGES + _text(completion))
            for prompt, completion in zip(prompts, call.completions, strict=True)
        ]
        return WireRequest(msgspec.json.encode({"query": queries, "prompts": prompts, "labels": labels}))

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return the verdicts in an answer. A single number is accepted as the reward of a single completion.

        Raises:
            InvalidAnswerError: The answer is not a JSON object with rewards or scores.
        """
        answer = as_object(parse_json(body), what="the answer")
        rewards = answer.get("rewards", answer.get("scores"))
        if rewards is None:
            raise InvalidAnswerError("the answer has neither rewards nor scores")
        num_completions = len(call.completions)
        if num_completions == 1 and isinstance(rewards, int | float):
            rewards = [rewards]
        logs = _logs(answer.get("extra_logs"), num_completions)
        return [
            msgspec.structs.replace(verdict, components=logs[index]) if verdict.outcome == "scored" else verdict
            for index, verdict in enumerate(judge(rewards, num_completions))
        ]


def _logs(found: object, num_completions: int) -> list[dict[str, float]]:
    """Return the numbers of the answer's ``extra_logs`` for each completion.

    Lists of another length and values that are not finite numbers are ignored: logs are only for people to read.
    """
    logs: list[dict[str, float]] = [{} for _ in range(num_completions)]
    if not isinstance(found, dict):
        return logs
    for name, values in list(cast("dict[str, object]", found).items())[:MAX_COMPONENTS]:
        if not isinstance(values, list) or len(cast("list[object]", values)) != num_completions:
            continue
        for log, value in zip(logs, cast("list[object]", values), strict=True):
            number = finite(value)
            if number is not None:
                log[component_name(name)] = number
    return logs


def _label_column(spec: EndpointSpec) -> str | None:
    return None if spec.openrlhf is None else spec.openrlhf.label_column


def _text(messages: Completion) -> str:
    if isinstance(messages, str):
        return messages
    return _BETWEEN_MESSAGES.join(map(chat_text, messages))
