"""The addresses of a server's sockets."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradserve.address import Address
from gradserve.memory.machine import machine_id
from gradserve.v1 import socket_messages_pb2 as messages_pb2


@dataclass
class SocketAddresses:
    """Where the sockets are bound, once they are.

    Attributes:
        tcp: The TCP sockets. An empty host stands for the host of the gRPC address that a client uses.
        unix_path: The path of the Unix socket, empty if there is none.
    """

    tcp: Sequence[Address] = ()
    unix_path: str = ""

    def message(self) -> messages_pb2.SocketAddresses:
        """Returns the addresses as a message."""
        return messages_pb2.SocketAddresses(
            tcp=[messages_pb2.TcpSocket(host=each.host, port=each.port) for each in self.tcp],
            unix_path=self.unix_path,
            machine=machine_id(),
        )
