"""Origins of URLs: their scheme, host and port. Pure."""

import httpx

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Return the origin of a URL, such as ``http://agents:9000``.

    Raises:
        ValueError: The URL is malformed, or has a user or password in it. The message does not repeat it.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError("the URL cannot be parsed; write it as http://host:port/path") from error
    if parsed.scheme not in _DEFAULT_PORTS or not parsed.host or parsed.userinfo or parsed.fragment:
        raise ValueError("the URL is not of the form http://host:port/path or https://host:port/path")
    return f"{parsed.scheme}://{parsed.raw_host.decode('ascii')}:{parsed.port or _DEFAULT_PORTS[parsed.scheme]}"
