"""TLS of the services: a server's certificate, the CAs that clients trust, and explanations of failed handshakes.

    HEADRACE_TLS_CERT_FILE   the service's certificate, PEM, followed by its intermediate certificates
    HEADRACE_TLS_KEY_FILE    its private key, PEM, without a password
    HEADRACE_TLS_CA_FILE     the only CAs that are trusted when a service or a command calls another service

A renewed certificate is used from the next handshake on, without a restart: the files are checked at each new
connection, at most once a second. If certificate and key do not belong together, or cannot be read, that is logged, and
the certificate that was read last stays in use.

A client also trusts the CAs of a changed file from its next request on: cert-manager replaces a CA while services run.
"""

import contextlib
import functools
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.errors import UserError
from shared.service.file_mark import FileMark, mark_of

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

CA_VARIABLE = "HEADRACE_TLS_CA_FILE"
_LOOK_EVERY_S = 1.0
_EXPIRED, _NOT_YET_VALID = 10, 9
_WRONG_NAME = frozenset({62, 64})
"""Codes of X509_verify_cert_error_string: wrong host name, wrong IP address."""


class ServerCertificate:
    """The certificate that a service shows to clients.

    Args:
        cert_file: The certificate, with its chain.
        key_file: The certificate's key.
        look_every_s: Shortest time between two checks of the files, in seconds.

    Raises:
        UserError: The files cannot be used.
    """

    def __init__(self, cert_file: Path, key_file: Path, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._files = (cert_file, key_file)
        self._look_every_s = look_every_s
        self._looked_at = time.monotonic()
        self._marks = self._marks_now()
        self._why_unreadable = ""
        """Why the files could not be read at the last look; empty if they could."""
        self._newest = _loaded(cert_file, key_file)
        self.context = _loaded(cert_file, key_file)
        """TLS context for the server. Each handshake uses the newest certificate."""
        self.context.sni_callback = self._show_newest

    def make_context(self, *_: object) -> ssl.SSLContext:
        """Return ``context``. uvicorn calls this with its own configuration."""
        return self.context

    def _show_newest(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        self._look()
        handshake.context = self._newest

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < self._look_every_s:
            return
        self._looked_at = time.monotonic()
        marks = self._marks_now()
        if marks == self._marks and not self._why_unreadable:  # files may be unreadable only for a moment
            return
        is_changed, self._marks = marks != self._marks, marks
        try:
            self._newest = _loaded(*self._files)
        except UserError as error:
            if is_changed or str(error) != self._why_unreadable:
                self._why_unreadable = str(error)
                log.error("%s. The certificate that was read last stays in use", error)  # noqa: TRY400  a sentence
            return
        self._why_unreadable = ""
        log.info("the certificate in %s was read again", self._files[0])

    def _marks_now(self) -> list[FileMark | None]:
        return [mark_of(file) for file in self._files]


@dataclass(frozen=True)
class PeerTls:
    """TLS settings for https calls to services.

    Args:
        ca_file: The only CAs that are trusted; the certifi package's if None.
        server_name: The name that certificates must have; if empty, the host of each address.
    """

    ca_file: Path | None = None
    server_name: str = ""

    def for_async_client(self) -> dict[str, Any]:
        """Return the arguments that apply these settings to an httpx.AsyncClient.

        The client reads ``ca_file`` again when it has changed. It still trusts the CAs that it read before.

        Raises:
            UserError: ``ca_file`` cannot be read, or contains no certificates.
        """

        async def name_server(request: "httpx.Request") -> None:
            request.extensions = {**request.extensions, "sni_hostname": self.server_name}

        hooks: list[Callable[[httpx.Request], Awaitable[None]]] = [name_server] if self.server_name else []
        if self.ca_file is None:
            context = _trusting_certifi()
        else:
            mark = mark_of(self.ca_file)
            context = trusted(self.ca_file)
            hooks.append(_rereading(self.ca_file, mark, context))
        return {"verify": context, "trust_env": False, "event_hooks": {"request": hooks}}


PUBLIC_TLS = PeerTls()
"""Trusts the CAs of the certifi package."""


def trusted(ca_file: Path | None) -> ssl.SSLContext:
    """Return a client's SSL context that trusts only the CAs of a file; without a file, certifi's.

    Raises:
        UserError: The file cannot be read, or contains no certificates.
    """
    if ca_file is None:
        import httpx

        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:  # ssl.SSLError is an OSError
        raise UserError(f"{CA_VARIABLE}: {_why_unreadable(ca_file, error, 'certificates')}") from error


@functools.cache
def _trusting_certifi() -> ssl.SSLContext:
    """Return one SSL context for all clients of an event loop, because loading so many CAs takes 20 ms.

    Clients in several threads cannot share it: httpcore changes a context at each connection.
    """
    return trusted(None)


def _rereading(
    ca_file: Path, mark: FileMark | None, context: ssl.SSLContext
) -> "Callable[[httpx.Request], Awaitable[None]]":
    """Return a hook that makes ``context`` also trust the CAs in a changed file. ``mark`` is that of the file read."""

    async def read_again(_: "httpx.Request") -> None:
        nonlocal mark
        now = mark_of(ca_file)
        if now == mark:
            return
        with contextlib.suppress(OSError):  # also ssl.SSLError: half written, so the next request tries again
            context.load_verify_locations(cafile=ca_file)
            mark = now
            log.info("the CAs in %s were read again", ca_file)

    return read_again


def why_refused(server: ssl.SSLContext, client: ssl.SSLContext, *, host: str) -> str:
    """Return why a client would refuse a server that it reaches by the name ``host``; empty if it would accept it.

    The handshake takes place in memory: nothing is sent anywhere.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    for end in (ours, theirs, ours):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return trouble_with(error, host=host) or str(error)
    return ""


def trouble_with(error: BaseException, *, host: str = "") -> str:
    """Return the problem and a remedy if TLS made a call fail; else an empty string.

    Args:
        error: An exception of httpx or of the ssl module.
        host: The host that was called.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _why_untrusted(cause, host)
        if isinstance(cause, ssl.SSLError):
            return _why_no_tls(cause)
    return ""


def why_away(error: "httpx.HTTPError | httpx.InvalidURL", *, url: str) -> str:
    """Return why a request to a server failed: the problem with TLS and its remedy, else httpx's message."""
    import httpx

    if trouble := trouble_with(error, host=urlsplit(url).hostname or ""):
        return trouble
    said = str(error) or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:"):
        return f"{said}; a server that speaks TLS closes the connection like this: if it does, write https://"
    return said


def _why_untrusted(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in _WRONG_NAME:
        name = f"{host}" if host else "the name in its address"
        return f"its certificate is not for {name}: issue one that names it, or use a name that it has"
    if error.verify_code == _EXPIRED:
        return "its certificate has expired: renew it in the files of HEADRACE_TLS_CERT_FILE and HEADRACE_TLS_KEY_FILE"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: a clock is wrong, here or where it was issued"
    return (
        f"its certificate is not trusted here ({error.verify_message}): set {CA_VARIABLE} to a file with the "
        "certificate of the CA that issued it"
    )


def _why_no_tls(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_EOF_WHILE_READING"):
        return f"the server there does not speak TLS: write http:// if that is meant ({reason})"
    return f"TLS failed ({reason})"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _loaded(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for variable, file in (("CERT", cert_file), ("KEY", key_file)):
        try:
            file.read_bytes()
        except OSError as error:
            raise UserError(f"HEADRACE_TLS_{variable}_FILE: {_why_unreadable(file, error, '')}") from error
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except _EncryptedError as error:
        raise UserError(f"HEADRACE_TLS_KEY_FILE: {key_file} has a password: use a key without a password") from error
    except OSError as error:  # ssl.SSLError is one; another means that a file has just disappeared
        raise UserError(_why_not_loaded(cert_file, key_file, error)) from error
    return context


class _EncryptedError(Exception):
    pass


def _no_password() -> str:
    """Raise an error instead of letting OpenSSL ask for a password at the terminal."""
    raise _EncryptedError


def _why_not_loaded(cert_file: Path, key_file: Path, error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    if reason == "KEY_VALUES_MISMATCH":
        return f"HEADRACE_TLS_KEY_FILE: {key_file} is not the key of the certificate in {cert_file}"
    return (
        f"HEADRACE_TLS_CERT_FILE, HEADRACE_TLS_KEY_FILE: {cert_file} must hold a certificate and {key_file} its key, "
        f"both as PEM ({reason or error})"
    )


def _why_unreadable(file: Path, error: OSError, what: str) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{file} contains no {what} as PEM"
    return f"{file} cannot be read: {error.strerror or type(error).__name__}"
