"""A CA for tests, and the certificates that it issues."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Issued:
    """The files of an issued certificate."""

    cert: Path
    key: Path

    def environment(self, authority: "Authority") -> dict[str, str]:
        """Return the TLS variables for a service."""
        return {
            "HEADRACE_TLS_CERT_FILE": str(self.cert),
            "HEADRACE_TLS_KEY_FILE": str(self.key),
            "HEADRACE_TLS_CA_FILE": str(authority.file),
        }


class Authority:
    """A CA.

    Args:
        directory: Directory for its files.
        name: The CA's name in the certificates that it issues.
    """

    def __init__(self, directory: Path, name: str = "authority of the test") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(self._subject, self._subject, self._key.public_key(), days=10)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / "ca.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, days: float = 5, file: str = "service", password: bytes = b"") -> Issued:
        """Issue a certificate for these names and addresses; by default, for this machine.

        Args:
            names: Names and IP addresses.
            days: Days until it expires; negative if it has expired already.
            file: Name of its files, which are replaced if they exist.
            password: Password of its key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        chosen = names or NAMES
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, chosen[0])])
        certificate = (
            _builder(subject, self._subject, key.public_key(), days=days)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in chosen]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        issued = Issued(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        issued.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issued.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
        return issued


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begins = now - datetime.timedelta(days=abs(days) + 1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
