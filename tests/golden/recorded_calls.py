"""Calls as they were on the wire: recorded between a client and its server, and played back to later ones.

A recording is a JSON array of calls in the order in which they began, each with the bytes of its messages in base64.
"""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

FOLDER = Path(__file__).parent
_DETAILS = "grpc-status-details-bin"


@dataclass
class RecordedCall:
    """A call with its messages as they were on the wire.

    Attributes:
        path: The method, such as "/gradserve.v1.AccumulatorService/PushPull".
        requests: The messages that the client sent.
        replies: The messages that the server sent.
        code: The name of the status that the server ended the call with; "CANCELLED" if the client ended it.
        message: The message of the status.
        details: The serialized google.rpc.Status; empty for none.
    """

    path: str
    requests: list[bytes]
    replies: list[bytes] = field(default_factory=list)
    code: str = "OK"
    message: str = ""
    details: bytes = b""

    @property
    def method(self) -> str:
        """The name of the method alone."""
        return self.path.rpartition("/")[2]


def recordings() -> dict[str, Path]:
    """Returns the recordings by the versions of gradserve that they are of."""
    return {path.stem.removeprefix("client_calls_"): path for path in sorted(FOLDER.glob("client_calls_*.json"))}


def write(calls: list[RecordedCall], path: Path) -> None:
    """Writes a recording."""
    written = [
        {
            "path": call.path,
            "requests": [base64.b64encode(each).decode() for each in call.requests],
            "replies": [base64.b64encode(each).decode() for each in call.replies],
            "code": call.code,
            "message": call.message,
            "details": base64.b64encode(call.details).decode(),
        }
        for call in calls
    ]
    path.write_text(json.dumps(written, indent=1) + "\n")


def read(path: Path) -> list[RecordedCall]:
    """Reads a recording."""
    return [
        RecordedCall(
            each["path"],
            [base64.b64decode(message) for message in each["requests"]],
            [base64.b64decode(message) for message in each["replies"]],
            each["code"],
            each["message"],
            base64.b64decode(each["details"]),
        )
        for each in json.loads(path.read_text())
    ]


def start(channel: grpc.Channel, path: str, requests: list[bytes], timeout: float | None = None) -> Any:
    """Starts a call of any kind of method; returns an iterator of the bytes of its replies, which is the call, too."""
    method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    return method(iter(requests), timeout=timeout)


@contextmanager
def recorder(server: str, calls: list[RecordedCall]) -> Iterator[str]:
    """Listens between clients and a server while entered; adds what passes to `calls`. Returns its address.

    Unary calls are streams of one message on the wire, so one kind of handler takes all methods.
    """
    with grpc.insecure_channel(server) as channel:

        def relay(path: str, requests: list[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = RecordedCall(path, requests)
            calls.append(call)
            forwarded = start(channel, path, requests)
            if not context.add_callback(forwarded.cancel):
                forwarded.cancel()
            try:
                for reply in forwarded:
                    call.replies.append(reply)
                    yield reply
            except grpc.RpcError as error:
                failed: Any = error
                call.code, call.message = failed.code().name, failed.details()
                call.details = dict(failed.trailing_metadata() or ()).get(_DETAILS, b"")
                _fail(call, context)

        with _serving(relay) as address:
            yield address


@contextmanager
def player(calls: list[RecordedCall]) -> Iterator[str]:
    """Answers clients as the recorded server did while entered: each call of a method gets its next recorded answer.

    Calls that no client of that version made end with UNIMPLEMENTED, as on a server that lacks the method.
    """
    left: dict[str, list[RecordedCall]] = {}
    for call in calls:
        left.setdefault(call.path, []).append(call)
    lock = threading.Lock()

    def answer(path: str, _requests: list[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with lock:
            waiting = left.get(path)
            call = waiting.pop(0) if waiting else RecordedCall(path, [], code="UNIMPLEMENTED", message="not recorded")
        yield from call.replies
        if call.code != "OK":
            _fail(call, context)

    with _serving(answer) as address:
        yield address


def _fail(call: RecordedCall, context: grpc.ServicerContext) -> None:
    if call.details:
        context.set_trailing_metadata(((_DETAILS, call.details),))
    context.abort(grpc.StatusCode[call.code], call.message)


@contextmanager
def _serving(answer: Any) -> Iterator[str]:
    class AllMethods(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            path = details.method

            def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
                return answer(path, list(requests), context)  # type: ignore[no-any-return]

            return grpc.stream_stream_rpc_method_handler(handle)

    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[AllMethods()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()
