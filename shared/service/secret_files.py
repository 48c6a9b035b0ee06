"""Reads secrets that are mounted as files, so that no environment, image or `docker inspect` contains them.

    HEADRACE_API_KEY_FILE          the content is HEADRACE_API_KEY
    HEADRACE_INTERNAL_KEY_FILE     the content is HEADRACE_INTERNAL_KEY
    HEADRACE_REDIS_PASSWORD_FILE   the content is the password of HEADRACE_REDIS_URL, which then contains none

They are read once, at the entry point. A changed file takes effect at the next start. No message ever quotes a secret.
"""

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_MAX_BYTES = 4096


def read_secret(path: Path, *, variable: str, otherwise: str = "mount the secret there") -> str:
    """Return a file's content, without surrounding white space.

    Args:
        path: The file with the secret.
        variable: The variable that names the file.
        otherwise: Advice in the message if the file cannot be read.

    Raises:
        ValueError: The file is missing, cannot be read, is empty, or is not one line. The message names ``variable``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode().strip()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ValueError(f"{variable}: {path} cannot be read: {why}; {otherwise}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{variable}: {path} is not text") from error
    if not text:
        raise ValueError(f"{variable}: {path} is empty; write the secret into it")
    if len(data) > _MAX_BYTES or len(text.split()) > 1:
        raise ValueError(f"{variable}: {path} must hold one secret, on one line and without spaces")
    return text


def with_password(url: str, password: str) -> str:
    """Return a Redis URL with ``password`` added. A user in the URL is kept.

    Raises:
        ValueError: The URL already has a password.
    """
    parts = urlsplit(url)
    if parts.password:
        raise ValueError(
            "HEADRACE_REDIS_URL has a password and HEADRACE_REDIS_PASSWORD_FILE names another; keep one of them"
        )
    _, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{host}"))


def password_of(url: str) -> str:
    """Return the password in a Redis URL, or ""."""
    return unquote(urlsplit(url).password or "")


def without_password(url: str) -> str:
    """Return a Redis URL without its password. ``with_password`` can add it again."""
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{host}" if parts.username else host))
