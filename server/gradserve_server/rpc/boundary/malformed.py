"""Messages that are not valid protobuf."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle

Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class MalformedMessage:
    """Stands for a message that could not be decoded, and says why."""

    reason: str


def tolerant(decode: Decode) -> Decode:
    """Makes a decoder return malformed messages as values: its errors would reach the client as UNKNOWN."""

    def decode_or_say_why(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError as error:
            return MalformedMessage(str(error))

    return decode_or_say_why


class RefuseMalformed:
    """Answers malformed messages with InvalidArgumentError."""

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that passes on well-formed messages."""
        if method.client_streaming:
            return lambda requests, call: handle(_checked_all(requests), call)

        def checked(request: Any, call: Call) -> Any:
            return handle(_checked(request), call)

        return checked


def _checked(request: Any) -> Any:
    if isinstance(request, MalformedMessage):
        raise InvalidArgumentError(f"the message is not valid protobuf of the expected type: {request.reason}")
    return request


async def _checked_all(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
