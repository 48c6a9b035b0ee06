"""Checks the Redis and HTTP addresses that users give, and adds the password from a file to a Redis address.

No error shows a password.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import SplitResult, quote, urlsplit

from headrace.known_keys import secret_of
from shared.errors import UserError


def redis_address(url: str, environment: Mapping[str, str]) -> str:
    """Return a Redis URL. If it has no password, add the one in the file that HEADRACE_REDIS_PASSWORD_FILE names.

    Raises:
        UserError: The URL is neither empty nor a Redis address, or the file holds no password.
    """
    if not url:
        return ""
    if not url.startswith(("redis://", "rediss://")):
        raise UserError(f"{url.rpartition('@')[2]} is not a redis:// or rediss:// address")
    try:
        parts = _split(url)
    except UserError:
        raise UserError(
            "the address of Redis cannot be read: percent-encode the password in it, or leave it out and name a file "
            "that holds it in HEADRACE_REDIS_PASSWORD_FILE"
        ) from None  # the original error may quote a part of the password
    file = environment.get("HEADRACE_REDIS_PASSWORD_FILE", "")
    if not file or parts.password:
        return url
    host, password = parts.netloc.rpartition("@")[2], secret_of(file, "HEADRACE_REDIS_PASSWORD_FILE")
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{host}").geturl()


def refuse_unless_http(url: str) -> None:
    """Raise UserError unless the address is empty, or an http:// or https:// URL without a user and a password."""
    if "@" in url:
        raise UserError("an address of headrace has no user and no password: set the key in HEADRACE_API_KEY")
    if url and not (url.startswith(("http://", "https://")) and _split(url).hostname):
        raise UserError(f"{url} is not an http:// or https:// address")


def is_loopback(url: str) -> bool:
    """Return whether a URL can be reached from this machine only: by loopback, `localhost` or a Unix socket."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or parts.scheme == "unix"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # it may quote a part of a Redis password
        raise UserError(f"an address cannot be read: {error}") from error
    return parts
