"""The wire format ``headrace``: sends the run, the group and the deadline, and reads a status for each completion.

{"request_id", "run_id", "group_id", "policy_version", "trainer_state", "max_completion_length", "deadline_at_s",
 "items": [{"index": 0, "prompt", "completion", "completion_ids", "columns": {...}, "environment": {...}}, ...]}
-->
{"items": [{"index": 0, "status": "scored", "score": 0.5, "components": {"style": 1.0}, "detail": "..."}, ...]}
"""

from typing import Any, cast

import msgspec

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.wire_format import (
    InvalidAnswerError,
    RequestContext,
    WireRequest,
    as_object,
    finite_components,
    parse_json,
)
from services.rewarder.reward_call import RewardCall, Verdict, judge, with_objects
from shared.messages import CallOutcome
from shared.user_code.error_text import printable

_STATUSES: tuple[CallOutcome, ...] = ("scored", "not_applicable", "timeout", "invalid", "overload", "error")


class HeadraceFormat:
    """Writes requests and reads answers in headrace's own format, with one item per completion."""

    max_batch: int | None = None

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return an empty list: the columns that the endpoint reads are not known."""
        return []

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Accept every call, because this format needs no particular column."""

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return a request with one item per completion."""
        items: list[dict[str, Any]] = []
        completion_ids = call.completion_id_lists() if spec.send_completion_ids else None
        for index, (prompt, completion) in enumerate(zip(call.prompts, call.completions, strict=True)):
            item: dict[str, Any] = {"index": index, "prompt": prompt, "completion": with_objects(completion)}
            if completion_ids is not None:
                item["completion_ids"] = completion_ids[index]
            item["columns"] = {name: column[index] for name, column in call.columns.items()}
            if call.environments is not None:
                item["environment"] = call.environments[index].attributes
            items.append(item)
        body = {
            "request_id": context.request_id,
            "run_id": context.run_id,
            "group_id": call.group_id,
            "policy_version": call.policy_version,
            "trainer_state": call.trainer_state.known(),
            "max_completion_length": call.max_completion_length,
            "deadline_at_s": context.deadline_at_s,
            "items": items,
        }
        return WireRequest(msgspec.json.encode(body))

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return the verdicts, sorted by ``index`` if the items have it, else in the order of the items."""
        items = as_object(parse_json(body), what="the answer").get("items")
        num_completions = len(call.completions)
        if not isinstance(items, list):
            raise InvalidAnswerError("the answer has no list called items")
        listed = cast("list[object]", items)
        if len(listed) != num_completions:
            raise InvalidAnswerError(
                f"returned {len(listed)} items for {num_completions} completions; return one for each"
            )
        objects = [as_object(item, what="an item of the answer") for item in listed]
        return [_verdict(item) for item in _in_order(objects)]


def _in_order(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not any("index" in item for item in items):
        return items
    by_index: dict[int, dict[str, Any]] = {}
    for item in items:
        index = item.get("index")
        if type(index) is not int or not 0 <= index < len(items):
            raise InvalidAnswerError(
                f"an item has no index from 0 to {len(items) - 1}; give all items an index, or none"
            )
        if index in by_index:
            raise InvalidAnswerError(f"index {index} occurs twice")
        by_index[index] = item
    return [by_index[index] for index in range(len(items))]


def _verdict(item: dict[str, Any]) -> Verdict:
    if "score" not in item and "status" not in item:
        names = ", ".join(name for name in item if name != "index") or "nothing"
        return Verdict("invalid", None, printable(f"returned neither a score nor a status, but {names}"))
    score, said = item.get("score"), item.get("detail")
    detail = printable(said) if isinstance(said, str) else ""
    status = item.get("status", "not_applicable" if score is None else "scored")
    if status not in _STATUSES:
        shown = repr(status[:50]) if isinstance(status, str) else type(status).__name__
        return Verdict("invalid", None, printable(f"returned status {shown}; use one of {', '.join(_STATUSES)}"))
    if status != "scored":
        return Verdict(status, None, detail)
    if score is None:
        return Verdict("invalid", None, "returned status 'scored' without a score")
    (verdict,) = judge([score], 1)
    if verdict.outcome != "scored":
        return verdict
    try:
        components = finite_components(as_object(item.get("components") or {}, what="components"))
    except InvalidAnswerError as error:
        return Verdict("invalid", None, printable(str(error)))
    return msgspec.structs.replace(verdict, detail=detail, components=components)
