"""The server's certificates."""

import ssl
from collections.abc import Sequence

from gradserve.transport.route import is_loopback
from gradserve_protocol.address import Address
from gradserve_protocol.tls import TLS, CertificateError, CertificateFiles
from gradserve_server.config import ListenConfig, TlsConfig

_SETTINGS = {"ca": "tls_client_ca", "certificate": "tls_certificate", "key": "tls_key"}


def server_certificates(config: TlsConfig) -> CertificateFiles | None:
    """Returns the certificates of a server; None if it does not encrypt. Those of `ca` are the authorities of clients.

    Raises:
        CertificateError: A file cannot be used.
    """
    if config.tls_certificate is None:
        return None
    if config.tls_key is None:
        raise CertificateError("key", "expected tls_key as well: the private key of the certificate")
    checks_clients = config.tls_client_ca is not None

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION
        made.num_tickets = 0  # clients would find their idle connections readable
        made.verify_mode = ssl.CERT_REQUIRED if checks_clients else ssl.CERT_NONE
        return made

    return CertificateFiles(TLS(config.tls_client_ca, config.tls_certificate, config.tls_key), context)


def context_of(certificates: CertificateFiles) -> ssl.SSLContext:
    """Returns a context for a server of asyncio: each connection uses the certificates as they are when it begins."""
    context = _NewestContext(ssl.PROTOCOL_TLS_SERVER)
    context.certificates = certificates
    return context


class _NewestContext(ssl.SSLContext):
    """A context without certificates of its own, which event loops give their connections to."""

    certificates: CertificateFiles

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begins a connection. asyncio and uvloop call this for each one."""
        newest = self.certificates.current().context
        return newest.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def setting_of(error: CertificateError) -> str:
    """Returns the name of the setting that names the file."""
    return _SETTINGS[error.role]


def unprotected(addresses: Sequence[Address], *, is_encrypted: bool) -> str:
    """Returns a warning of addresses that other machines may reach without protection, or nothing.

    Args:
        addresses: The addresses on which the server listens.
        is_encrypted: Whether connections over TCP are encrypted.
    """
    public = [str(each) for each in addresses if each.host and not _is_private(each.host)]
    if is_encrypted or not public:
        return ""
    return f"other machines may reach {', '.join(public)}, and there is no encryption (--tls-certificate, --tls-key)"


def explicit_bulk_address(config: ListenConfig) -> list[Address]:
    """Returns the address that was given for the bulk socket, if one was."""
    return [] if config.bulk_listen in ("auto", "off") else [Address.to_listen(config.bulk_listen)]


def _is_private(host: str) -> bool:
    return is_loopback(host) and host not in ("0.0.0.0", "::")
