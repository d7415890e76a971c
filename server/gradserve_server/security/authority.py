"""A private authority, and the certificates that it signs, in a folder of files."""

import contextlib
import datetime
import ipaddress
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradserve_protocol.tls import read_regular
from gradserve_server.runtime.files import reason_of

_MOST_BYTES = 1 << 20
_AUTHORITY_DAYS = 3650
_SKEW = datetime.timedelta(hours=1)
"""The most that clocks of other machines may be behind."""
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class AuthorityError(Exception):
    """Certificates cannot be made. The message says why."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its key in files."""

    certificate: Path
    key: Path


class Authority:
    """An authority with its certificate and key in `ca.pem` and `ca.key` of a folder."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def in_folder(cls, folder: Path, now: datetime.datetime | None = None) -> "Authority":
        """Returns the authority of a folder; makes both if they do not exist.

        Raises:
            AuthorityError: Its files cannot be read or written.
        """
        now = now or datetime.datetime.now(datetime.UTC)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "ca.pem").exists() or (folder / "ca.key").exists():
                return cls._read(folder)
            key = ec.generate_private_key(ec.SECP256R1())
            name = _name("gradserve private authority")
            certificate = (
                _builder(name, name, key, now, _AUTHORITY_DAYS, key)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs_certificates=True), critical=True)
                .sign(key, hashes.SHA256())
            )
            _write(folder / "ca", certificate, key)
        except OSError as error:
            raise AuthorityError(f"{error.filename or folder}: {reason_of(error)}") from None
        return cls(folder, certificate, key)

    @classmethod
    def _read(cls, folder: Path) -> "Authority":
        try:
            certificate = x509.load_pem_x509_certificate(read_regular(folder / "ca.pem", _MOST_BYTES))
            key = serialization.load_pem_private_key(read_regular(folder / "ca.key", _MOST_BYTES), None)
        except (ValueError, TypeError):
            raise AuthorityError(f"{folder}: ca.pem and ca.key are not those of an authority") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AuthorityError(f"{folder}: ca.key is not the key of ca.pem")
        return cls(folder, certificate, key)

    def issue_server(self, hosts: Sequence[str], days: float, now: datetime.datetime | None = None) -> Issued:
        """Makes `server.pem` and `server.key`, for the names and addresses of a server.

        Raises:
            AuthorityError: A host is neither a name nor an address, or the files cannot be written.
        """
        names = [_host_name(each) for each in hosts]
        return self._issue("server", hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, days, now)

    def issue_client(self, name: str, days: float, now: datetime.datetime | None = None) -> Issued:
        """Makes `NAME.pem` and `NAME.key`, for a client.

        Raises:
            AuthorityError: That is no name for a client, or the files cannot be written.
        """
        if not _CLIENT_NAME.fullmatch(name) or name in ("ca", "server"):
            raise AuthorityError(
                f"expected letters, digits, dots, - and _ as the name of a client, not ca or server, got {name!r}"
            )
        return self._issue(name, name, [x509.DNSName(name)], ExtendedKeyUsageOID.CLIENT_AUTH, days, now)

    def _issue(
        self,
        file_name: str,
        common_name: str,
        names: Sequence[x509.GeneralName],
        use: x509.ObjectIdentifier,
        days: float,
        now: datetime.datetime | None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        now = now or datetime.datetime.now(datetime.UTC)
        certificate = (
            _builder(_name(common_name), self._certificate.subject, key, now, days, self._key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        try:
            return _write(self._folder / file_name, certificate, key)
        except OSError as error:
            raise AuthorityError(f"{error.filename or self._folder}: {reason_of(error)}") from None


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except ValueError:
        raise AuthorityError(f"expected the name or the IP address of a host, got {host!r}") from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: float,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(base: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    """Replaces the two files of a certificate. Only their owner can read the key."""
    issued = Issued(base.with_name(f"{base.name}.pem"), base.with_name(f"{base.name}.key"))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(issued.key, pem, 0o600)
    _replace(issued.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return issued


def _replace(path: Path, contents: bytes, mode: int) -> None:
    descriptor, beside = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(contents)
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
