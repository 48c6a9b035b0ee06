"""The languages reward endpoints speak: how a call becomes a request body, and an answer becomes verdicts.

    RewardCall --slices of batch_size--> encode --> body --HTTP--> body --> decode --> one Verdict a completion

A format knows nothing of HTTP but the body and, if it needs one, a path below the registered URL. One that can put only
one completion into a request says so with ``max_batch``. To add one: a file like trl_format.py, a line in
known_formats.py, its name in ``spec.WireFormatName``, and, if it has options, a section in the specification.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.reward_call import RewardCall, Verdict, printable

MAX_COMPONENTS = 64
_MAX_COMPONENT_NAME = 64


class RequestContext(msgspec.Struct, frozen=True):
    """What a request says of itself.

    ``request_id`` is the same for each try; ``run_id`` is null outside of runs; ``deadline_at_s`` is in Unix seconds.
    With ``signed_at_s`` all tries carry that time in their signature, and otherwise each its own.
    """

    request_id: str
    run_id: str | None
    deadline_at_s: float
    signed_at_s: float | None = None


class WireRequest(msgspec.Struct, frozen=True):
    """One request: its JSON body, and what to add to the registered path."""

    body: bytes
    path: str = ""


class InvalidAnswerError(Exception):
    """The answer is not what the format asks for: ``invalid`` for every completion of the request."""


class NothingToJudgeError(Exception):
    """The row lacks what would be judged: ``not_applicable``."""


class WireFormat(Protocol):
    """One language."""

    @property
    def max_batch(self) -> int | None:
        """How many completions a request can hold; None is any number."""
        ...

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return, as inner lists, data set columns of each of which one is needed."""
        ...

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Refuse a call for which there is no request.

        Raises:
            CallError: The call lacks what the format needs.
            NothingToJudgeError: This row does.
        """
        ...

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return the request for all completions of ``call``, which ``check`` let through."""
        ...

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return one verdict for each completion of ``call``.

        Raises:
            InvalidAnswerError: The body is not an answer.
        """
        ...


def batch_size(spec: EndpointSpec, wire_format: WireFormat) -> int | None:
    """Return how many completions go into one request; None is all of them."""
    return min((size for size in (spec.batch_size, wire_format.max_batch) if size is not None), default=None)


def slices(call: RewardCall, size: int | None) -> list[RewardCall]:
    """Return the call in parts of at most ``size`` completions."""
    num_completions = len(call.completions)
    if size is None or size >= num_completions:
        return [call]

    def part(start: int) -> RewardCall:
        end = start + size
        return msgspec.structs.replace(
            call,
            prompts=call.prompts[start:end],
            completions=call.completions[start:end],
            columns={name: column[start:end] for name, column in call.columns.items()},
            completion_ids=None if call.completion_ids is None else call.completion_ids[start:end],
        )

    return [part(start) for start in range(0, num_completions, size)]


def parse_json(text: bytes | str, *, what: str = "the answer") -> Any:
    """Return what a text holds. NaN and Infinity, which many servers write, are let through to be judged one by one.

    Raises:
        InvalidAnswerError: It is not JSON, or an object in it has two values for one name.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise InvalidAnswerError(f"{what} has {component_name(name)!r} twice in one object")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:  # of bytes that are no text, too
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidAnswerError(f"{what} is no JSON{where}") from error


def finite_components(found: Mapping[str, Any]) -> dict[str, float]:
    """Return named parts of a reward; raises InvalidAnswerError if one is no finite number."""
    if len(found) > MAX_COMPONENTS:
        raise InvalidAnswerError(f"returned {len(found)} components, more than {MAX_COMPONENTS}")
    components: dict[str, float] = {}
    for name, value in found.items():
        number = finite(value)
        if number is None:
            raise InvalidAnswerError(f"component {component_name(name)!r} is no finite number")
        components[component_name(name)] = number
    return components


def component_name(name: str) -> str:
    """Return a name short enough to keep."""
    return printable(name[:_MAX_COMPONENT_NAME])


def as_object(value: object, *, what: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object; raises InvalidAnswerError."""
    if not isinstance(value, dict):
        raise InvalidAnswerError(f"{what} is {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def finite(value: object) -> float | None:
    """Return ``value`` if it is a finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
