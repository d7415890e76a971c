"""The two requests: put and get.

A put has a length and that many bytes after it; it is answered by one byte. A get has a length and the number of puts
to wait for; it is answered by that many bytes.
"""

from __future__ import annotations

import socket
import struct

REQUEST = struct.Struct("<cQQ")
PUT, GET = b"p", b"g"


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fills the memory.

    Raises:
        EOFError: The other side closed the connection.
    """
    while memory:
        received = connection.recv_into(memory)
        if not received:
            raise EOFError
        memory = memory[received:]
