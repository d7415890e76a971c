"""Frames on the sockets, and descriptors that come with them.

The first byte of an input says how: bit 0 without a HELLO before, bit 1 over the Unix socket, bit 2 with a
descriptor. The rest is what is sent.
"""

import os
import random
import socket
import struct
from typing import Any, Self

from gradserve_protocol.frames import HEADER_BYTES, PROTOCOL, FrameError, FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.sealed import make_region
from gradserve_protocol.v1 import socket_messages_pb2
from tests.fuzz.mutations import mutated_bytes, mutated_request
from tests.fuzz.targets.recording import ALONE, kind_of
from tests.fuzz.targets.served import HANG_SECONDS, NOT_FINE, WAITING, Served
from tests.fuzz.targets.target import Found
from tests.servers.raw_calls import METHODS

_NO_HELLO, _UNIX, _DESCRIPTOR = 1, 2, 4
_NUMBERS = (0, 1, 2, 31, 32, 64, 256, 257, 65_536, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_HEADER = "<BBHIQQQ"
_LARGEST = tuple(256 ** struct.calcsize(f"<{each}") - 1 for each in _HEADER[1:])
_REGION_BYTES = 1 << 16


class Frames:
    """Sends frames to a server."""

    def __init__(self) -> None:
        region = FrameHeader(FrameKind.REGION, number=1, size=_REGION_BYTES).pack()
        drop = FrameHeader(FrameKind.DROP, number=1).pack()
        self.corpus = [bytes([_UNIX | _DESCRIPTOR]) + region + drop, bytes([_NO_HELLO]) + _hello(b"x")]
        for method, request in ALONE.calls():
            if not (METHODS[method].client_streaming or METHODS[method].server_streaming or method in WAITING):
                call = _call(method, request)
                self.corpus += [bytes([0]) + call, bytes([_UNIX | _DESCRIPTOR]) + region + call]
        put = next(request for method, request in ALONE.calls() if method == "StoreTensors")
        self.corpus.append(bytes([0]) + _call("StoreTensors", put, payload=bytes(16)))
        self._served = Served()

    def __enter__(self) -> Self:
        self._served.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._served.__exit__(*exception)

    def mutated(self, data: bytes, chance: random.Random) -> bytes:
        how, frames = data[:1] or b"\0", data[1:]
        if chance.random() < 0.1:
            how = bytes([chance.randrange(8)])
        if chance.random() < 0.5 and len(frames) >= HEADER_BYTES:
            return how + _mutated_header(frames, chance)
        if chance.random() < 0.5:
            method, request = chance.choice(recorded_unary())
            request = mutated_request(request, kind_of(method), chance)
            return how + _call(
                method, request, payload=chance.randbytes(chance.choice((0, 0, 64, 4096))), chance=chance
            )
        return how + mutated_bytes(frames, chance)

    def run(self, data: bytes) -> None:
        how = data[0] if data else 0
        ticket = self._served.raw.call("IssueTicket", socket_messages_pb2.IssueTicketRequest(client_id="somebody"))
        with _connected(ticket, how) as sock:
            try:
                if not how & _NO_HELLO:
                    sock.sendall(_hello(ticket.ticket))
                if data[1:]:
                    _send(sock, data[1:], with_descriptor=bool(how & _UNIX and how & _DESCRIPTOR))
                sock.shutdown(socket.SHUT_WR)
                _check_replies(_rest(sock))
            except TimeoutError:
                raise Found("the connection stays open though its client has said the last word") from None
            except OSError:  # the server has closed the connection
                pass
        self._served.check_log()

    def check(self) -> None:
        self._served.check()


def recorded_unary() -> list[tuple[str, bytes]]:
    """Returns recorded requests of the methods that sockets have, but for those that wait."""
    return [
        (method, request)
        for method, request in ALONE.calls()
        if not (METHODS[method].client_streaming or METHODS[method].server_streaming or method in WAITING)
    ]


def _hello(ticket: bytes) -> bytes:
    message = socket_messages_pb2.Hello(ticket=ticket, client_id="somebody").SerializeToString()
    return FrameHeader(FrameKind.HELLO, message_bytes=len(message), number=PROTOCOL).pack() + message


def _call(method: str, request: bytes, payload: bytes = b"", chance: random.Random | None = None) -> bytes:
    name = f"{METHODS[method].containing_service.full_name}.{method}".encode()
    segments = b""
    if chance is not None and chance.random() < 0.5:
        segments = pack_segments(
            [
                Segment(*(chance.choice((0, 0, 64, len(payload), chance.choice(_NUMBERS))) for _ in range(4)))
                for _ in range(chance.choice((1, 2, 5)))
            ]
        )
    header = FrameHeader(
        FrameKind.CALL,
        name_bytes=len(name),
        message_bytes=len(request),
        payload_bytes=len(payload),
        number=10**6,
        size=len(segments) // 32,
    )
    return header.pack() + name + segments + request + payload


def _mutated_header(frames: bytes, chance: random.Random) -> bytes:
    fields = list(struct.unpack_from(_HEADER, frames))
    place = chance.randrange(len(fields))
    fields[place] = min(chance.choice(_NUMBERS), _LARGEST[place])
    return struct.pack(_HEADER, *fields) + frames[HEADER_BYTES:]


def _connected(ticket: Any, how: int) -> socket.socket:
    if how & _UNIX:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(ticket.addresses.unix_path)
    else:
        place = ticket.addresses.tcp[0]
        sock = socket.create_connection((place.host or "127.0.0.1", place.port))
    sock.settimeout(HANG_SECONDS)
    return sock


def _send(sock: socket.socket, data: bytes, *, with_descriptor: bool) -> None:
    if not with_descriptor:
        return sock.sendall(data)
    descriptor, _memory = make_region(_REGION_BYTES, read_only_for_others=False)
    try:
        sent = socket.send_fds(sock, [data], [descriptor])
    finally:
        os.close(descriptor)
    return sock.sendall(data[sent:])


def _rest(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _check_replies(data: bytes) -> None:
    while len(data) >= HEADER_BYTES:
        try:
            header = FrameHeader.unpack(data[:HEADER_BYTES])
        except FrameError as error:
            raise Found(f"the server sent what is no frame: {error}") from None
        if header.kind is FrameKind.REPLY and header.code in NOT_FINE - {14}:
            raise Found(f"a call ended with {header.code}: {data[HEADER_BYTES : HEADER_BYTES + header.head_bytes]!r}")
        if header.num_segments:  # its payload may be in a region
            return
        data = data[HEADER_BYTES + header.head_bytes + header.payload_bytes :]
