"""The two methods of the bare streams, without serializers."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

SERVICE = "ceiling.Bytes"
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
_CHUNK = bytes(1 << 20)


def chunks(num_bytes: int) -> Iterator[bytes]:
    """Yields messages of 1 MiB and a shorter one, made without copying if possible."""
    for _ in range(num_bytes // len(_CHUNK)):
        yield _CHUNK
    if rest := num_bytes % len(_CHUNK):
        yield _CHUNK[:rest]


class Stub:
    """Both methods, for a synchronous client."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address, options=OPTIONS)
        grpc.channel_ready_future(channel).result(timeout=30)
        self._put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{SERVICE}/Put")
        self._get: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Get")

    def put(self, num_bytes: int) -> int:
        """Sends that many bytes; returns how many arrived."""
        return int(self._put(chunks(num_bytes)))

    def get(self, num_bytes: int) -> int:
        """Asks for that many bytes; returns how many arrived."""
        return sum(len(chunk) for chunk in self._get(b"%d" % num_bytes))
