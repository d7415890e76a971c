"""Reads what a caller over gRPC shows."""

from dataclasses import replace

from gradserve_server.rpc.boundary.status import Context
from gradserve_server.security.credentials import Credentials, in_authorization
from gradserve_server.security.peer import PeerCertificate

_HEADER = "authorization"


def credentials_of(context: Context, certificate: PeerCertificate | None) -> Credentials:
    """Returns the credentials of a call, of which the certificate is checked already."""
    values = [value for key, value in context.invocation_metadata() or () if key == _HEADER and isinstance(value, str)]
    return replace(in_authorization(values), certificate=certificate, is_local=context.peer().startswith("unix:"))
