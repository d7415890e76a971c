"""HTTP/2 as a broken or hostile client may send it: frames of any bytes, which no library makes right."""

import socket
import struct
from collections.abc import Iterable, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4

CANCEL = struct.pack(">I", 8)

Text = str | bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


HELLO = PREFACE + frame(SETTINGS)


def settings(**values: int) -> bytes:
    """Settings of a client by name, such as `initial_window_size`."""
    numbers = {"initial_window_size": 4}
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items()))


def connect(address: str) -> socket.socket:
    """Opens a connection."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def is_ended(connection: socket.socket) -> bool:
    """True if the server has ended a connection. Reads what has come."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def field(name: Text, value: Text) -> bytes:
    """A header field, written out (RFC 7541, literal without indexing)."""
    return b"\0" + _string(name) + _string(value)


def request_fields(path: Text, extra: Mapping[Text, Text] | None = None, **replaced: Text) -> bytes:
    """The header fields of a call; `replaced` has others for ":method" (method), ":scheme", ":authority" and "te"."""
    pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "somewhere", "te": "trailers"}
    fields: dict[Text, Text] = {
        **{name: replaced.get(name.lstrip(":"), value) for name, value in pseudo.items()},
        "content-type": replaced.get("content_type", "application/grpc"),
        **(extra or {}),
    }
    return b"".join(field(name, value) for name, value in fields.items())


def headers(fields: bytes, stream: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, fields)


def message(payload: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message, which may say another length than it has."""
    return bytes([flag]) + struct.pack(">I", len(payload) if length is None else length) + payload


def call(path: Text, payload: bytes, extra: Mapping[Text, Text] | None = None, stream: int = 1) -> bytes:
    """A call with one whole message."""
    return headers(request_fields(path, extra), stream) + frame(DATA, END_STREAM, stream, message(payload))


def send(address: str, data: bytes, *, reset: bool = False, listen: float = 0.0) -> None:
    """Sends `data` over a connection of its own, listens for some seconds, and closes or resets it."""
    with connect(address) as connection:
        try:
            connection.sendall(data)
            if listen:
                connection.settimeout(listen)
                while connection.recv(1 << 16):
                    pass
        except OSError:
            pass  # the server had enough of it, or nothing more to say
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def kinds_of(data: bytes) -> list[int]:
    """Returns the kinds of the frames that came whole."""
    kinds, start = [], 0
    while start + 9 <= len(data) and (end := start + 9 + int.from_bytes(data[start : start + 3], "big")) <= len(data):
        kinds.append(data[start + 3])
        start = end
    return kinds


def _string(text: Text) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    if len(data) < 127:
        return bytes([len(data)]) + data
    return b"\x7f" + bytes(_varint(len(data) - 127)) + data


def _varint(number: int) -> Iterable[int]:
    while number >= 128:
        yield number % 128 + 128
        number //= 128
    yield number
