"""The interface of wire formats, which encode a reward call as a request body and decode an answer into verdicts.

    RewardCall --slices of batch_size--> encode --> body --HTTP--> body --> decode --> one Verdict per completion

A format handles only the body and, if needed, a path below the registered URL. The rest of HTTP is not its business.
A format that can send only one completion per request sets ``max_batch``. To add a format, write a file like
trl_format.py, add a line to ``FORMATS`` in endpoint_client.py, and add the name to ``spec.WireFormatName``. If the
format has options, add a section to the specification.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.reward_call import RewardCall, Verdict
from shared.user_code.error_text import printable

MAX_COMPONENTS = 64
_MAX_COMPONENT_NAME = 64


class RequestContext(msgspec.Struct, frozen=True):
    """The id, the run and the times of a request to an endpoint.

    ``request_id`` is the same for all tries. ``run_id`` is None outside of runs. ``deadline_at_s`` is in Unix seconds.
    If ``signed_at_s`` is set, the signatures of all tries have that time; otherwise each try has its own.
    """

    request_id: str
    run_id: str | None
    deadline_at_s: float
    signed_at_s: float | None = None


class WireRequest(msgspec.Struct, frozen=True):
    """A request to an endpoint: its JSON body, and a path to append to the registered URL's path."""

    body: bytes
    path: str = ""


class InvalidAnswerError(Exception):
    """The endpoint's answer does not follow the wire format. Every completion of the request is ``invalid``."""


class NothingToJudgeError(Exception):
    """The dataset row lacks a value that the wire format needs. The row's completion is ``not_applicable``."""


class WireFormat(Protocol):
    """The interface of a wire format: it writes requests to an endpoint and reads the answers."""

    @property
    def max_batch(self) -> int | None:
        """Largest number of completions in one request; None means no limit."""
        ...

    def required_columns(self, spec: EndpointSpec) -> list[list[str]]:
        """Return the data set columns that a call needs: at least one from each inner list."""
        ...

    def check(self, call: RewardCall, *, spec: EndpointSpec) -> None:
        """Refuse a call that cannot be sent in this format.

        Raises:
            CallError: The call lacks something that the format needs.
            NothingToJudgeError: Only this dataset row lacks something that the format needs.
        """
        ...

    def encode(self, call: RewardCall, *, spec: EndpointSpec, context: RequestContext) -> WireRequest:
        """Return the request for all completions of ``call``, which has passed ``check``."""
        ...

    def decode(self, body: bytes, *, call: RewardCall, spec: EndpointSpec) -> list[Verdict]:
        """Return one verdict for each completion of ``call``.

        Raises:
            InvalidAnswerError: The body does not follow the format.
        """
        ...


def batch_size(spec: EndpointSpec, wire_format: WireFormat) -> int | None:
    """Return the most completions for one request to an endpoint; None if there is no limit."""
    return min((size for size in (spec.batch_size, wire_format.max_batch) if size is not None), default=None)


def slices(call: RewardCall, size: int | None) -> list[RewardCall]:
    """Split a call into parts of at most ``size`` completions each; into one part if ``size`` is None."""
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
            environments=None if call.environments is None else call.environments[start:end],
        )

    return [part(start) for start in range(0, num_completions, size)]


def parse_json(text: bytes | str, *, what: str = "the answer") -> Any:
    """Parse JSON. NaN and Infinity, which many servers write, are accepted here and checked value by value later.

    Raises:
        InvalidAnswerError: The text is not JSON, or an object in it has the same name twice.
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
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidAnswerError(f"{what} is not JSON{where}") from error


def finite_components(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the components of a reward: the named numbers that an endpoint may report beside the reward.

    Raises:
        InvalidAnswerError: There are more than ``MAX_COMPONENTS``, or one is not a finite number.
    """
    if len(found) > MAX_COMPONENTS:
        raise InvalidAnswerError(f"returned {len(found)} components, more than {MAX_COMPONENTS}")
    components: dict[str, float] = {}
    for name, value in found.items():
        number = finite(value)
        if number is None:
            raise InvalidAnswerError(f"component {component_name(name)!r} is not a finite number")
        components[component_name(name)] = number
    return components


def component_name(name: str) -> str:
    """Return the name of a reward's component as printable text of at most 64 characters."""
    return printable(name[:_MAX_COMPONENT_NAME])


def as_object(value: object, *, what: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object; raises InvalidAnswerError if it is not."""
    if not isinstance(value, dict):
        raise InvalidAnswerError(f"{what} is {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def finite(value: object) -> float | None:
    """Return ``value`` as a float if it is a finite JSON number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
