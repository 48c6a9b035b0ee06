"""Checks a Redis URL before a connection is made, because redis-py misreads many wrong URLs.

redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]    rediss://... with TLS    unix://PATH
"""

from urllib.parse import urlsplit

_SCHEMES = ("redis", "rediss", "unix")


def why_no_redis_url(url: str) -> str | None:
    """Return why ``url`` cannot name a Redis, without anything that may be secret; None if it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "its port is not a number from 1 to 65535, or its host is in wrong brackets"
    if parts.scheme not in _SCHEMES:
        return "it does not begin with redis://, rediss:// (with TLS) or unix://"
    if parts.scheme == "unix":
        return None
    if port == 0:
        return "its port is 0"
    if not parts.hostname:
        return "it names no host"
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        return "the part after the host must be the number of a database"
    return None
