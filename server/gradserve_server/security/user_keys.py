"""Keys by which users of Unix sockets show over gRPC who they are."""

import base64
import hmac
import secrets
import struct
from collections.abc import Callable

from gradserve_server.errors import UnauthenticatedError

LIFETIME_SECONDS = 600.0
_SECRET_BYTES = 32
_CONTENTS = struct.Struct("!Id")
"""The user, and the time at which the key expires."""


class UserKeys:
    """Makes and checks the keys of users.

    gRPC does not say which user is at the other end of a Unix socket; the kernel does, for a socket of the server's
    own. Over that one a client gets a key: the number of its user and a time of expiry, with their HMAC under a secret
    of 256 random bits that never leaves this object. So nothing has to be kept for a key, and none outlives the server.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes a monotonic clock in seconds."""
        self._clock = clock
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def issue(self, uid: int) -> str:
        """Returns a key of a user, visible ASCII characters without spaces."""
        contents = _CONTENTS.pack(uid, self._clock() + LIFETIME_SECONDS)
        return base64.urlsafe_b64encode(contents + self._code(contents)).decode()

    def user_of(self, key: str) -> int:
        """Returns the user whose key this is.

        Raises:
            UnauthenticatedError: It is nobody's, or nobody's any more.
        """
        try:
            shown = base64.urlsafe_b64decode(key.encode())
        except ValueError:
            shown = b""
        contents, code = shown[: _CONTENTS.size], shown[_CONTENTS.size :]
        if hmac.compare_digest(code, self._code(contents)):
            uid: int
            uid, end = _CONTENTS.unpack(contents)
            if self._clock() < end:
                return uid
        raise UnauthenticatedError("the key of this user has expired, or is of another run of the server")

    def _code(self, contents: bytes) -> bytes:
        return hmac.digest(self._secret, contents, "sha256")
