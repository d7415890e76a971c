"""Encrypted connections to a server's sockets."""

import socket
import ssl
import time
from typing import ClassVar

from gradserve.errors import UnavailableError
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import Connect, ConnectedSocket, Connection
from gradserve_protocol.tls import SecureSocket


class SecureConnection(Connection):
    """An encrypted connection; beside it, a subclass derives from the kind that waits for it."""

    _socket: SecureSocket
    _tls: ClassVar[type[SecureSocket]] = SecureSocket
    """The sockets with TLS."""

    @classmethod
    async def _secured(cls, connected: socket.socket, step: Connect, settings: ConnectionSettings) -> ConnectedSocket:
        try:
            secured = cls._tls(secured_by(settings, connected, step.server_name))
        except OSError as error:
            raise not_secured(step.place, error) from None
        try:
            await cls._shake_hands(secured, time.monotonic() + step.limit.at_most(settings.sockets.hello))
        except OSError as error:
            secured.close()
            raise not_secured(step.place, error) from None
        except BaseException:
            secured.close()
            raise
        return secured

    async def _strand(self, connected: socket.socket, end: float) -> ConnectedSocket:
        strand = SecureSocket(secured_by(self._settings, connected, self._socket.server_name))
        try:
            await self._shake_hands(strand, end)
        except BaseException:
            strand.close()
            raise
        return strand

    @classmethod
    async def _shake_hands(cls, secured: SecureSocket, end: float) -> None:
        """Carries out the handshake.

        Raises:
            OSError: It failed.
        """
        while True:
            try:
                return secured.shake_hands()
            except ssl.SSLWantReadError:
                sends = False
            except ssl.SSLWantWriteError:
                sends = True
            await cls._wait_until(end, secured, sends=sends)

    def is_usable(self) -> bool:
        return super().is_usable() and not self._socket.pending()


def secured_by(settings: ConnectionSettings, connected: socket.socket, server_name: str) -> ssl.SSLSocket:
    """Returns a socket with TLS, not blocking, over a connected one, which it owns. Its handshake comes next.

    Args:
        settings: The settings, which have certificates.
        connected: The connected socket; closed in case of an error.
        server_name: The name that the server's certificate has to have.

    Raises:
        OSError: It is not connected any more.
    """
    assert settings.certificates is not None
    try:
        connected.setblocking(False)
        context = settings.certificates.current().context
        return context.wrap_socket(connected, server_hostname=server_name, do_handshake_on_connect=False)
    except BaseException:
        connected.close()
        raise


def not_secured(place: Place, error: OSError) -> UnavailableError:
    """Returns the error of a handshake of TLS that failed."""
    match error:
        case TimeoutError():
            reason = "no answer in time"
        case ssl.SSLCertVerificationError():
            reason = f"the certificate of the server is not accepted: {error.verify_message}"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "UNEXPECTED_MESSAGE"):
            reason = "the server does not use TLS there"
        case _:
            reason = error.strerror or str(error)
    return UnavailableError(f"no connection to {place}: {reason}", code="GS_TLS")
