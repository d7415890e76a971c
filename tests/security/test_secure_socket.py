"""A socket with TLS, used like one without."""

import socket
import ssl
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gradserve_protocol.frames import Buffers
from gradserve_protocol.tls import SecureSocket, client_certificates
from gradserve_server.security.tls import server_certificates
from tests.servers.certificates import Certificates
from tests.servers.polling import PATIENCE_SECONDS, eventually

RECORD = 1 << 14


@pytest.fixture
def ends(certificates: Certificates) -> Iterator[tuple[SecureSocket, SecureSocket]]:
    """A client and a server that have shaken hands."""
    server_files = server_certificates(certificates.config().tls)
    client_files = client_certificates(certificates.client())
    assert server_files is not None
    assert client_files is not None
    below = socket.socketpair()
    for each in below:
        each.setblocking(False)
    client = SecureSocket(
        client_files.current().context.wrap_socket(below[0], server_hostname="localhost", do_handshake_on_connect=False)
    )
    server = SecureSocket(
        server_files.current().context.wrap_socket(below[1], server_side=True, do_handshake_on_connect=False)
    )

    def is_done() -> bool:
        done = 0
        for each in (client, server):
            try:
                each.shake_hands()
            except ssl.SSLWantReadError:
                continue
            done += 1
        return done == 2

    eventually(is_done)
    yield client, server
    client.close()
    server.close()


def received(sock: SecureSocket, memory: memoryview) -> int:
    """Fills memory as far as bytes have arrived."""
    try:
        return sock.recv_into(memory)
    except BlockingIOError:
        return 0


def test_nothing_to_receive_or_no_room_to_send(ends: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = ends
    for call in (lambda: server.recv(1), lambda: server.recv_into(memoryview(bytearray(1)))):
        with pytest.raises(BlockingIOError):
            call()
    with pytest.raises(BlockingIOError):
        server.recvmsg_into([memoryview(bytearray(1))])
    with pytest.raises(BlockingIOError):
        server.recv(1, socket.MSG_PEEK)
    while client.sendmsg([bytes(RECORD)] * 100) == 100 * RECORD:
        pass
    with pytest.raises(BlockingIOError):
        client.send(bytes(RECORD))


def test_what_is_decrypted_but_not_taken_is_pending(ends: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = ends
    assert client.send(b"abcdefgh") == 8
    assert server.recv(3) == b"abc"
    assert server.pending() == 5
    with pytest.raises(BlockingIOError):
        server.recv(1, socket.MSG_PEEK)  # the system has nothing
    buffers = [memoryview(bytearray(2)), memoryview(bytearray(9))]
    assert server.recvmsg_into(buffers)[0] == 5
    assert bytes(buffers[0]) + bytes(buffers[1][:3]) == b"defgh"
    assert not server.pending()


def test_small_buffers_share_a_record(ends: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = ends
    pieces: list[bytes | memoryview] = [b"head", memoryview(b"name"), b"x" * 100]
    assert client.sendmsg(pieces) == 108
    assert server.recv(RECORD) == b"".join(pieces)
    assert not server.pending()


@pytest.mark.parametrize("sizes", [[1 << 21], [40, 3, RECORD - 43, 7, 1 << 20, 0, 5], [RECORD] * 30, [1000] * 1500])
def test_every_byte_arrives_once_however_often_the_system_has_no_room(
    ends: tuple[SecureSocket, SecureSocket], sizes: list[int]
) -> None:
    client, server = ends
    rng = np.random.default_rng(7)
    data = rng.bytes(sum(sizes))
    ends_of = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    buffers = [memoryview(data)[end - size : end] for size, end in zip(sizes, ends_of, strict=True)]
    got = memoryview(bytearray(len(data)))
    num_got = num_waits = 0
    unsent = Buffers(buffers)
    while num_got < len(data):
        while unsent:
            try:
                unsent.advance(client.sendmsg(unsent.next()))
            except BlockingIOError:
                num_waits += 1
                break
        num_got += received(server, got[num_got : num_got + 100_000])
    assert bytes(got) == data
    assert num_waits


def test_the_end(ends: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = ends
    client.send(b"last")
    client.shutdown(socket.SHUT_WR)
    assert server.recv(9) == b"last"
    assert server.recv(9) == b""
    assert server.recv_into(memoryview(bytearray(9))) == 0


def test_it_ends_while_another_thread_uses_it(ends: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = ends
    ended = threading.Event()

    def read() -> None:
        while True:
            try:
                if not client.recv(1):
                    return ended.set()
            except BlockingIOError:
                continue

    thread = threading.Thread(target=read)
    thread.start()
    server.send(b"some")
    client.shutdown(socket.SHUT_RDWR)
    assert ended.wait(PATIENCE_SECONDS)
    thread.join()
