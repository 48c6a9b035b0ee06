"""The keys that a service accepts: the keys it was started with, and named keys from a file that may change.

    HEADRACE_API_KEY[_FILE]         api-key        every scope of a user
    HEADRACE_INTERNAL_KEY[_FILE]    internal-key   the scope between services
    HEADRACE_API_KEYS_FILE          named keys     the scopes that their lines name

Requests check the file for changes, at most once a second; a removed key is refused after that. An unknown key makes
the keyring check at once. If the file is broken, the keys that were read last stay in force, and the log and a metric
report it. A service does not start with a broken file.
"""

import hmac
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from shared.access.named_keys import KeysFileError, NamedKey, api_key, digest_of, internal_key, read_keys_file
from shared.access.route_table import INTERNAL, Need
from shared.errors import UserError
from shared.service.file_mark import FileMark, mark_of
from shared.service.logs import AUDIT_LOGGER

log = logging.getLogger(__name__)
audit_log = logging.getLogger(AUDIT_LOGGER)

VARIABLE = "HEADRACE_API_KEYS_FILE"
LOOK_EVERY_S = 1.0


class Keyring:
    """Holds the keys that a service accepts, and finds the key that a request sends.

    Args:
        api: The API key; empty without one.
        internal: The internal key; empty without one.
        file: The file of named keys; None without one.
        look_every_s: Shortest time between two checks of the file, in seconds.

    Raises:
        UserError: The file is broken.
    """

    def __init__(
        self, *, api: str = "", internal: str = "", file: Path | None = None, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._api = api_key(api) if api else None
        self._internal = internal_key(internal) if internal else None
        self._file = file
        self._look_every_s = look_every_s
        self._looked_at = time.monotonic()
        self._looking = threading.Lock()
        self._mark: FileMark | None = None
        self._named: tuple[NamedKey, ...] = ()
        self._why_unreadable = ""
        """Why the file could not be read the last time; empty if it could."""
        self._read_at = time.monotonic()
        if file is not None:
            self._mark = mark_of(file)
            try:
                self._named = read_keys_file(file)
            except KeysFileError as error:
                raise UserError(f"{VARIABLE}: {error}") from error

    def is_open_to_all(self, need: Need) -> bool:
        """Return whether routes with this scope need no key. The settings allow that on loopback only."""
        return self._internal is None if need == INTERNAL else self._api is None and self._file is None

    def find(self, shown: bytes, need: Need) -> NamedKey | None:
        """Return the key that was sent, even if it has expired or lacks the scope; None if it is unknown.

        Routes between services accept only the internal key, and all other routes only users' keys. All keys are
        compared, each in constant time.
        """
        digest = digest_of(shown)
        self._look()
        if (found := self._matching(digest, need)) is None and need != INTERNAL:
            self._look(now=True)  # the key may be new
            found = self._matching(digest, need)
        return found

    def _matching(self, digest: bytes, need: Need) -> NamedKey | None:
        found = None
        for key in (self._internal,) if need == INTERNAL else (*self._named, self._api):
            if key is not None and hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def is_for_good(self, key: NamedKey) -> bool:
        """Whether the service was started with this key. Such a key stays valid while the service runs."""
        return key is self._api or key is self._internal

    def allows(self, key: NamedKey, need: Need) -> bool:
        """Whether a named key that was found earlier is still valid and has the scope ``need``."""
        self._look()
        now = next((known for known in self._named if known.digest == key.digest), None)
        return now is not None and not now.has_expired() and need in now.scopes

    def is_file_broken(self) -> bool:
        """Whether the keys file cannot be read now, so that the keys that were read last are in force."""
        self._look()
        return bool(self._why_unreadable)

    def _look(self, *, now: bool = False) -> None:
        """Reload the keys file if it has changed. Called by the event loop and by the metrics thread."""
        if self._file is None or not (now or time.monotonic() - self._looked_at >= self._look_every_s):
            return
        if not self._looking.acquire(blocking=now):  # for an unknown key, wait: the other thread may read it now
            return
        try:
            self._looked_at = time.monotonic()
            mark = mark_of(self._file)
            # A file may be unreadable only for a moment. Wrong keys must not have it read at each request.
            is_due = bool(self._why_unreadable) and time.monotonic() - self._read_at >= self._look_every_s
            if mark != self._mark or is_due:
                is_changed, self._mark = mark != self._mark, mark
                self._read_again(self._file, is_changed=is_changed)
        finally:
            self._looking.release()

    def _read_again(self, file: Path, *, is_changed: bool) -> None:
        self._read_at = time.monotonic()
        try:
            named = read_keys_file(file)
        except KeysFileError as error:
            if is_changed or str(error) != self._why_unreadable:
                self._why_unreadable = str(error)
                log.error(  # noqa: TRY400  a sentence
                    "%s: %s. The %d keys that were read last stay in force, even if you revoked some: correct the file",
                    VARIABLE,
                    error,
                    len(self._named),
                )
            return
        audit_log.info("%s was read again: %s", VARIABLE, _what_changed(self._named, named))
        self._named, self._why_unreadable = named, ""


def keys_file_gauge(registry: CollectorRegistry) -> Gauge:
    """Return the metric that reports a broken keys file. The caller has it call ``Keyring.is_file_broken``."""
    return Gauge(
        "headrace_keys_file_broken",
        "1 while HEADRACE_API_KEYS_FILE cannot be read, so that keys which were read earlier stay in force",
        registry=registry,
    )


def _what_changed(before: Sequence[NamedKey], now: Sequence[NamedKey]) -> str:
    old, new = {key.name: key for key in before}, {key.name: key for key in now}
    changed = [name for name in new if name in old and new[name] != old[name]]
    parts = (("new", new.keys() - old.keys()), ("changed", changed), ("gone", old.keys() - new.keys()))
    said = [f"{what}: {', '.join(sorted(names))}" for what, names in parts if names]
    return f"{len(now)} keys" + (f"; {'; '.join(said)}" if said else "")
