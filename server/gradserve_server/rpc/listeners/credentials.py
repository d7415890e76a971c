"""A server's certificates as gRPC takes them."""

import threading

import grpc

from gradserve.security.certificates import CertificateFiles, Certificates


def port_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Returns the credentials of a port. Each new connection gets the newest certificates."""
    newest = _Newest(files)
    asks_clients = files.current().ca is not None
    return grpc.dynamic_ssl_server_credentials(newest.configuration(), newest.configuration, asks_clients)


class _Newest:
    """The newest certificates in gRPC's form. gRPC asks in threads of its own."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._certificates: Certificates | None = None
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        certificates = self._files.current()
        with self._lock:
            if self._configuration is None or certificates is not self._certificates:
                assert certificates.key is not None
                assert certificates.certificate is not None
                pair = (certificates.key, certificates.certificate)
                self._configuration = grpc.ssl_server_certificate_configuration([pair], certificates.ca)
                self._certificates = certificates
            return self._configuration
