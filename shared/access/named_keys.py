"""The keys file: named keys with scopes, one per line. It contains the sha256 of each key, never the key.

    # NAME     SHA256 OF THE KEY            SCOPES          EXPIRES
    ci         sha256:9f86d081884c7d65...   read,submit
    notebook   sha256:2c26b46b68ffc68f...   read,infer      2027-01-01

EXPIRES may be left out. It is a day or a time in ISO 8601, in UTC unless it has an offset; the key ends when that day
or time begins. A key is made by ``headrace keys add``, or is any long random text. A short one would be easy to guess
from its hash, which has no salt.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from shared.access.route_table import INTERNAL, SCOPES, Need, Scope

API_KEY_NAME, INTERNAL_KEY_NAME = "api-key", "internal-key"
"""Names of the two keys that a service is started with."""
HEADER = "# NAME  SHA256 OF THE KEY  SCOPES  EXPIRES"
"""The first line of a new keys file."""
MAX_KEYS = 1000
"""Every request compares all of them."""
_MAX_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)
_TAKEN = frozenset({API_KEY_NAME, INTERNAL_KEY_NAME, "nobody"})


class KeysFileError(ValueError):
    """The keys file, or a new line for it, is wrong. The message is a sentence that contains no key."""


@dataclass(frozen=True)
class NamedKey:
    """One key: its name, hash, scopes and expiry. Each line of a keys file describes one.

    Args:
        name: The key's name in logs.
        digest: sha256 of the key.
        scopes: The kinds of routes that the key opens.
        expires_at: When the key ends; None if it does not.
    """

    name: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Need]
    expires_at: datetime | None = None

    def has_expired(self) -> bool:
        """Return whether ``expires_at`` has passed."""
        return self.expires_at is not None and datetime.now(UTC) >= self.expires_at

    def scope_list(self) -> str:
        """Return the scopes as a keys file writes them."""
        return ",".join(scope for scope in SCOPES if scope in self.scopes)

    def line(self) -> str:
        """Return the key's line in a keys file."""
        expires = self.expires_at.isoformat() if self.expires_at is not None else ""
        return f"{self.name}  sha256:{self.digest.hex()}  {self.scope_list()}  {expires}".rstrip()


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key, which is stored and compared instead of the key."""
    return hashlib.sha256(key).digest()


def api_key(key: str) -> NamedKey:
    """Return the key of HEADRACE_API_KEY as a NamedKey with every scope that a user can have."""
    return NamedKey(API_KEY_NAME, digest_of(key.encode()), frozenset(SCOPES))


def internal_key(key: str) -> NamedKey:
    """Return the key that services show to each other as a NamedKey, which opens only internal routes."""
    return NamedKey(INTERNAL_KEY_NAME, digest_of(key.encode()), frozenset({INTERNAL}))


def read_keys_file(path: Path) -> tuple[NamedKey, ...]:
    """Return the keys in a keys file; empty if it has none.

    Raises:
        KeysFileError: The file cannot be read, or a line is wrong. The message has the line's number, never the key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except OSError as error:
        raise KeysFileError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise KeysFileError(f"{path} is not text") from error
    if len(data) > _MAX_BYTES:
        raise KeysFileError(f"{path} is larger than {_MAX_BYTES} bytes")
    return tuple(_checked(path, text))


def name_on(line: str) -> str:
    """Return the name of the key on a line of a keys file, or "" for a line without a key."""
    return next(iter(_words_on(line)), "")


def _words_on(line: str) -> list[str]:
    return line.partition("#")[0].split()


def _checked(path: Path, text: str) -> Iterator[NamedKey]:
    names, digests = set[str](), dict[bytes, str]()
    for number, line in enumerate(text.splitlines(), start=1):
        words = _words_on(line)
        if not words:
            continue
        where = f"{path}, line {number}"
        try:
            key = _key(words)
        except KeysFileError as error:
            raise KeysFileError(f"{where}: {error}") from error
        if key.name in names:
            raise KeysFileError(f"{where}: there are two keys {key.name}")
        if key.digest in digests:
            raise KeysFileError(f"{where}: {key.name} is the same key as {digests[key.digest]}")
        names.add(key.name)
        digests[key.digest] = key.name
        if len(names) > MAX_KEYS:
            raise KeysFileError(f"{path} has more than {MAX_KEYS} keys")
        yield key


def _key(words: Sequence[str]) -> NamedKey:
    if not 3 <= len(words) <= 4:
        raise KeysFileError("write NAME sha256:HEX SCOPES, and optionally when the key ends, with spaces between them")
    matched = _DIGEST.fullmatch(words[1])
    if matched is None:
        # Not quoted: it may be the key itself.
        raise KeysFileError("after the name comes sha256: and 64 hexadecimal digits, the hash of the key")
    return NamedKey(
        name=checked_name(words[0]),
        digest=bytes.fromhex(matched[1]),
        scopes=frozenset[Need](parse_scopes(words[2])),
        expires_at=parse_expiry(words[3]) if len(words) > 3 else None,
    )


def checked_name(name: str) -> str:
    """Return ``name`` if a key in the keys file may have it.

    Raises:
        KeysFileError: The name is malformed, or reserved.
    """
    if not _NAME.fullmatch(name):
        raise KeysFileError("a name has 1 to 64 letters, digits, dots, dashes, underscores and @")
    if name in _TAKEN:
        raise KeysFileError(f"{name} is reserved: it means something else in logs")
    return name


def parse_scopes(text: str) -> frozenset[Scope]:
    """Return the scopes in a comma-separated list.

    Raises:
        KeysFileError: A scope is unknown, or the list is empty.
    """
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - set(SCOPES))
    if unknown or not names:
        what = f"{unknown[0][:40]!r} is not a scope" if unknown else "a key needs a scope"
        raise KeysFileError(f"{what}; scopes are {', '.join(SCOPES)}")
    return frozenset(cast("list[Scope]", names))


def parse_expiry(text: str) -> datetime:
    """Parse the time at which a key ends: ISO 8601, in UTC unless it has an offset.

    Raises:
        KeysFileError: The text is not a time.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise KeysFileError("write the time when a key ends as 2027-01-31, or 2027-01-31T18:00Z") from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
