"""Reads what a caller over gRPC shows."""

from gradserve_server.rpc.boundary.status import Context
from gradserve_server.security.credentials import Credentials, digest_of
from gradserve_server.security.peer import PeerCertificate

_HEADER = "authorization"
_SCHEME = "bearer "
_USER_SCHEME = "gradserve-user "


def credentials_of(context: Context, certificate: PeerCertificate | None) -> Credentials:
    """Returns the credentials of a call, of which the certificate is checked already."""
    digest, user_key = b"", ""
    for key, value in context.invocation_metadata() or ():
        if key == _HEADER and isinstance(value, str):
            if value[: len(_USER_SCHEME)].lower() == _USER_SCHEME:
                user_key = value[len(_USER_SCHEME) :].strip()
                break
            # With another scheme, it is a token that nobody has.
            token = value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else value
            digest = digest_of(token.strip())
            break
    return Credentials(digest, certificate, is_local=context.peer().startswith("unix:"), user_key=user_key)
