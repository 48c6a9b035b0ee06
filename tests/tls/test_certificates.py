"""A service's certificate: what may be wrong with it, and that a renewed one is used without a restart."""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.errors import UserError
from shared.service.tls import PeerTls, ServerCertificate, trusted, why_away, why_refused
from tests.tls.authority import Authority, Issued


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


class Listener:
    """Accepts TLS connections, and sends "hello" to clients that complete the handshake."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                if self._context is None:
                    self._answer(connection)
                else:
                    with self._context.wrap_socket(connection, server_side=True) as spoken:
                        self._answer(spoken)

    def _answer(self, connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=120)


def serial_shown(port: int, authority: Authority) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(authority.file))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as spoken,
    ):
        shown = spoken.getpeercert()
        assert shown is not None
        return int(str(shown["serialNumber"]), 16)


def serial_in(issued: Issued) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(issued.cert.read_bytes()).serial_number


@pytest.fixture
def listening() -> Iterator[list[Listener]]:
    opened: list[Listener] = []
    yield opened
    for listener in opened:
        listener.close()


def test_a_renewed_certificate_is_shown_to_the_next_connection(
    authority: Authority, listening: list[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    first = authority.issue()
    certificate = ServerCertificate(first.cert, first.key, look_every_s=0)
    listening.append(Listener(certificate.context))
    port = listening[0].port
    assert serial_shown(port, authority) == serial_in(first)
    second = authority.issue()
    with caplog.at_level(logging.INFO):
        assert serial_shown(port, authority) == serial_in(second)
    assert f"the certificate in {second.cert} was read again" in caplog.messages
    assert serial_shown(port, authority) == serial_in(second)


async def test_a_ca_that_is_renewed_together_with_the_certificate_is_trusted_by_a_client_that_runs(
    tmp_path: Path, authority: Authority, listening: list[Listener]
) -> None:
    """The new CA has the same name. A client may look while the file is being written."""
    issued, renewed = authority.issue(), Authority(tmp_path / "renewed")
    listening.append(Listener(ServerCertificate(issued.cert, issued.key, look_every_s=0).context))
    url = f"https://127.0.0.1:{listening[0].port}/"
    tls = PeerTls(authority.file).for_async_client()
    async with httpx.AsyncClient(timeout=120, **tls) as client:
        assert (await client.get(url)).text == "hello"
        authority.file.write_text("")
        assert (await client.get(url)).text == "hello", "the CA that was read last is still trusted"
        second = renewed.issue()
        second.cert.replace(issued.cert)
        second.key.replace(issued.key)
        renewed.file.replace(authority.file)
        assert (await client.get(url)).text == "hello"


def test_files_that_do_not_fit_each_other_change_nothing_and_are_reported(
    authority: Authority, listening: list[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    """Simulate the moment when only the first of the two files has been written."""
    first = authority.issue()
    certificate = ServerCertificate(first.cert, first.key, look_every_s=0)
    listening.append(Listener(certificate.context))
    port, before = listening[0].port, serial_in(first)
    second = authority.issue(file="second")
    first.cert.write_bytes(second.cert.read_bytes())
    assert serial_shown(port, authority) == before
    first.key.unlink()
    assert serial_shown(port, authority) == before
    assert serial_shown(port, authority) == before
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert said[0].startswith(f"HEADRACE_TLS_KEY_FILE: {first.key} is not the key of the certificate in {first.cert}.")
    assert "cannot be read: No such file" in said[1]
    assert all("The certificate that was read last stays in use" in line for line in said)
    first.key.write_bytes(second.key.read_bytes())
    assert serial_shown(port, authority) == serial_in(second)


def test_a_file_that_vanishes_while_it_is_loaded_changes_nothing_and_is_reported(
    authority: Authority,
    listening: list[Listener],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = authority.issue()
    certificate = ServerCertificate(first.cert, first.key, look_every_s=0)
    listening.append(Listener(certificate.context))
    port, before = listening[0].port, serial_in(first)
    first.key.unlink()

    def read_bytes(_: Path) -> bytes:
        return b"there a moment ago"

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert serial_shown(port, authority) == before
    assert "both as PEM (No such file or directory)" in caplog.text


def test_an_invalid_certificate_is_refused_with_a_remedy(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue(), authority.issue(file="other")
    locked = authority.issue(file="locked", password=b"secret")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    for cert, key, says in (
        (tmp_path / "missing", good.key, r"HEADRACE_TLS_CERT_FILE: .*missing cannot be read: No such file"),
        (good.cert, tmp_path, r"HEADRACE_TLS_KEY_FILE: .* cannot be read: Is a directory"),
        (good.cert, other.key, r"other\.key is not the key of the certificate in .*service\.pem"),
        (nonsense, good.key, r"nonsense\.pem must hold a certificate and .*service\.key its key, both as PEM"),
        (good.cert, nonsense, r"must hold a certificate and .*nonsense\.pem its key"),
        (locked.cert, locked.key, r"HEADRACE_TLS_KEY_FILE: .*locked\.key has a password: use a key without a password"),
    ):
        with pytest.raises(UserError, match=says):
            ServerCertificate(cert, key)


def test_a_file_of_trusted_cas_holds_certificates(tmp_path: Path, authority: Authority) -> None:
    assert len(trusted(authority.file).get_ca_certs()) == 1, "and no others"
    assert len(trusted(None).get_ca_certs()) > 10
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match=r"^HEADRACE_TLS_CA_FILE: .*empty contains no certificates as PEM"):
        trusted(tmp_path / "empty")
    with pytest.raises(UserError, match=r"^HEADRACE_TLS_CA_FILE: .*missing cannot be read: No such file"):
        trusted(tmp_path / "missing")


def test_a_certificate_is_checked_as_clients_would_before_it_is_shown(authority: Authority, tmp_path: Path) -> None:
    def made_of(issued: Issued, by: Authority, host: str = "127.0.0.1") -> str:
        return why_refused(ServerCertificate(issued.cert, issued.key).context, trusted(by.file), host=host)

    stranger = Authority(tmp_path / "stranger", "another authority")
    good = authority.issue()
    assert made_of(good, authority) == made_of(good, authority, "localhost") == ""
    assert "set HEADRACE_TLS_CA_FILE to a file with the certificate of the CA that issued it" in made_of(good, stranger)
    assert made_of(good, authority, "10.0.0.1") == (
        "its certificate is not for 10.0.0.1: issue one that names it, or use a name that it has"
    )
    assert "is not for trainer.example" in made_of(good, authority, "trainer.example")
    assert made_of(authority.issue("trainer.example"), authority, "trainer.example") == ""
    assert "its certificate has expired: renew it" in made_of(authority.issue(days=-1), authority)


def asked(url: str, authority: Authority) -> str:
    """Return the error message of a failing call."""
    with (
        httpx.Client(verify=trusted(authority.file), trust_env=False, timeout=120) as client,
        pytest.raises(httpx.TransportError) as raised,
    ):
        client.get(url)
    return why_away(raised.value, url=url)


def test_a_call_that_fails_for_tls_says_what_to_do(
    authority: Authority, tmp_path: Path, listening: list[Listener]
) -> None:
    good = authority.issue()
    listening += [Listener(ServerCertificate(good.cert, good.key).context), Listener(None)]
    with_tls, without = (listener.port for listener in listening)
    stranger = Authority(tmp_path / "stranger", "another authority")
    with httpx.Client(verify=trusted(authority.file), trust_env=False) as client:
        assert client.get(f"https://127.0.0.1:{with_tls}/").text == "hello"
    assert "set HEADRACE_TLS_CA_FILE" in asked(f"https://127.0.0.1:{with_tls}/", stranger)
    assert "does not speak TLS: write http://" in asked(f"https://127.0.0.1:{without}/", authority)
    assert "if it does, write https://" in asked(f"http://127.0.0.1:{with_tls}/", authority)
    assert why_away(httpx.ConnectError("refused"), url="https://127.0.0.1:1/") == "refused"
