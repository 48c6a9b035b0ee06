"""Checks that a URL in a run's options has an origin (scheme, host and port) that the operator allows."""

from collections.abc import Sequence

import httpx

from shared.errors import UserError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Return the origin of a URL, such as ``http://agents:9000``.

    Raises:
        ValueError: The URL is malformed, or has a user, a password or a fragment. The message does not repeat it.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError("the URL cannot be parsed; write it as http://host:port/path") from error
    if parsed.scheme not in _DEFAULT_PORTS or not parsed.host or parsed.userinfo or parsed.fragment:
        raise ValueError("the URL is not of the form http://host:port/path or https://host:port/path")
    return f"{parsed.scheme}://{parsed.raw_host.decode('ascii')}:{parsed.port or _DEFAULT_PORTS[parsed.scheme]}"


def require_allowed(url: str, allowed: Sequence[str], *, option: str, what: str, variable: str) -> None:
    """Raise UserError if a URL is malformed, or its origin is not among the allowed ones.

    Args:
        url: The URL in a run's options.
        allowed: The origins that the operator allows, as ``origin_of`` returns them.
        option: The run's option that has the URL, for the message.
        what: A plural noun for the services at such URLs, for the message.
        variable: The environment variable with the allowed origins, for the message.
    """
    try:
        origin = origin_of(url)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
    if origin not in allowed:
        raise UserError(
            f"{what} at {origin} are not allowed; an operator allows them with {variable} of the sessions service"
        )
