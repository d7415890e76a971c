"""The exchanges with the server that operations ask for."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from gradserve.errors import InvalidArgumentError, UnavailableError
from gradserve.v1 import tensor_messages_pb2, tensor_pb2
from gradserve.wire.contents import WithContents
from gradserve.wire.payload import Array

T = TypeVar("T")

_UPLOAD_PAUSES_SECONDS = (0.1, 0.2, 0.4, 0.8)
"""Between attempts, as the retry policy of unary calls."""

_LONGEST_SECONDS = 315_576_000_000


@dataclass(frozen=True)
class Unary:
    """One request, one response. Answered by the response.

    Attributes:
        service: Name of the service, without its package.
        method: Name of the method.
        request: The request.
        wait: For how many seconds the server may wait on purpose, on top of the client's timeout.
    """

    service: str
    method: str
    request: Message | WithContents
    wait: float = 0.0


@dataclass(frozen=True)
class Upload:
    """A PutTensors stream. Answered by the response."""

    header: tensor_messages_pb2.PutTensorsHeader
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Download:
    """A GetTensors stream. Answered by a list of new arrays."""

    request: tensor_messages_pb2.GetTensorsRequest
    num_bytes: int


@dataclass(frozen=True)
class Pause:
    """A time without an exchange. Answered by None."""

    seconds: float


Exchange: TypeAlias = Unary | Upload | Download | Pause
Operation: TypeAlias = Generator[Exchange, Any, T]


def check_timeout(timeout: float) -> float:
    """Returns a timeout that can be sent.

    Raises:
        InvalidArgumentError: It is negative, infinite, or more than the 10,000 years that fit into a Duration.
    """
    if not 0 <= timeout <= _LONGEST_SECONDS:
        raise InvalidArgumentError(f"expected a finite timeout of at least 0 s, got {timeout}", field="timeout")
    return timeout


def upload(
    header: tensor_messages_pb2.PutTensorsHeader, arrays: tuple[Array, ...]
) -> Operation[list[tensor_pb2.Tensor]]:
    """Puts arrays on the server; returns their messages with handles.

    Tries again while the server is unavailable: a stream that breaks leaves nothing behind.
    """
    for pause in _UPLOAD_PAUSES_SECONDS:
        try:
            reply: tensor_messages_pb2.PutTensorsResponse = yield Upload(header, arrays)
            return list(reply.tensors)
        except UnavailableError:
            yield Pause(pause)
    reply = yield Upload(header, arrays)
    return list(reply.tensors)
