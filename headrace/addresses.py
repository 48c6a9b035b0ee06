"""Reads addresses that people gave, and says of a wrong one what is wrong, without its password."""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import SplitResult, quote, urlsplit

from headrace.known_keys import secret_of
from shared.errors import UserError


def redis_address(url: str, environment: Mapping[str, str]) -> str:
    """Return a Redis URL, with the password of HEADRACE_REDIS_PASSWORD_FILE if it has none.

    Raises:
        UserError: It is no address of a Redis, or the file holds no password.
    """
    if not url:
        return ""
    if not url.startswith(("redis://", "rediss://")):
        raise UserError(f"{url.partition('@')[2] or url} is no redis:// or rediss:// address")
    try:
        parts = _split(url)
    except UserError:
        raise UserError(
            "the address of Redis cannot be read: percent-encode the password in it, or leave it out and name a file "
            "that holds it in HEADRACE_REDIS_PASSWORD_FILE"
        ) from None  # what is wrong with it may be a part of the password
    file = environment.get("HEADRACE_REDIS_PASSWORD_FILE", "")
    if not file or parts.password:
        return url
    host, password = parts.netloc.rpartition("@")[2], secret_of(file, "HEADRACE_REDIS_PASSWORD_FILE")
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{host}").geturl()


def refuse_unless_http(url: str) -> None:
    """Raise UserError unless an address can be asked over HTTP, or is empty."""
    if url and not (url.startswith(("http://", "https://")) and _split(url).hostname):
        raise UserError(f"{url} is no http:// or https:// address")


def is_loopback(url: str) -> bool:
    """Return whether nobody but this machine can use an address."""
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
    except ValueError as error:
        raise UserError(f"an address cannot be read: {error}") from error
    return parts
