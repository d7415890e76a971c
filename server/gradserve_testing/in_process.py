"""A server in the process of its test, which clients reach without a network."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from gradserve.transport.in_process import add_endpoint, remove_endpoint
from gradserve.transport.status import error_from_reply
from gradserve_protocol.address import Address
from gradserve_protocol.errors import GradserveError, UnimplementedError
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import encode_message
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.observe.calls import Way
from gradserve_server.rpc.boundary.chain import Call, Codec, Handle, Service, StreamedCall, origin
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.boundary.messages import RequestReader
from gradserve_server.rpc.boundary.status import status_code, status_message
from gradserve_server.security.identity import in_authorization
from gradserve_testing.server_thread import ServerThread


@dataclass(frozen=True)
class _Method:
    descriptor: MethodDescriptor
    handle: Handle
    read: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


class InProcessListener:
    """A `Listener` for clients of this process. Calls pass the same chain, with the same messages, as over gRPC."""

    def __init__(
        self,
        services: Sequence[Service],
        admission: Admission,
        limits: LimitsConfig,
        _certificates: CertificateFiles | None,
        way: Way,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._address = Address(name=uuid.uuid4().hex[:12])
        self._methods = {
            f"/{service.descriptor.full_name}/{method.name}": _method(service, method)
            for service in services
            for method in service.descriptor.methods
        }
        self._admission = admission
        self._max_message_bytes = limits.max_message_bytes
        self._way = way
        self._under_way: set[asyncio.Task[Any]] = set()
        self._is_over = False

    def bind(self, _addresses: Sequence[Address]) -> list[Address]:
        """Returns the one address that it has."""
        return [self._address]

    async def serve(self) -> None:
        """Lets clients connect."""
        add_endpoint(str(self._address), self)

    async def drain(self, grace: float) -> None:
        """Lets calls in flight go on for `grace` seconds, then ends them with UNAVAILABLE."""
        remove_endpoint(str(self._address))
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=grace)
        self._is_over = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def answer(
        self, path: str, requests: AsyncIterator[bytes], timeout: float | None, metadata: Metadata, /
    ) -> list[bytes]:
        """Answers a call; see `Endpoint`."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            async with asyncio.timeout(timeout):
                return await self._answer(path, requests, timeout, metadata)
        except TimeoutError:
            raise _as_client_sees(DeadlineExceededError(f"there was no answer within {timeout:.3g} s")) from None
        except ServiceError as error:
            raise _as_client_sees(error) from None
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            raise _as_client_sees(UnavailableError("the server is shutting down", code="GS_SHUTTING_DOWN")) from None
        finally:
            self._under_way.discard(task)

    async def _answer(
        self, path: str, requests: AsyncIterator[bytes], timeout: float | None, metadata: Metadata
    ) -> list[bytes]:
        method = self._methods.get(path)
        if method is None:
            raise UnimplementedError(f"no method {path!r} on this server")
        replies: list[bytes] = []

        async def send(response: Any) -> None:
            replies.append(method.encode(response))

        values = [value for key, value in metadata if key == "authorization"]
        about: dict[str, Any] = {
            "deadline": None if timeout is None else time.monotonic() + timeout,
            "credentials": partial(in_authorization, values),
            "origin": partial(origin, "in-process", dict(metadata)),
        }
        is_stream = method.descriptor.server_streaming
        name = method.descriptor.full_name
        call = StreamedCall(name, send=send, **about) if is_stream else Call(name, **about)
        self._way.calls += 1
        messages = self._messages(method, requests)
        try:
            response = await method.handle(
                messages if method.descriptor.client_streaming else await _only(messages), call
            )
            if not is_stream:
                await send(response)
        finally:
            call.end()
        self._way.sent += sum(map(len, replies))
        return replies

    async def _messages(self, method: _Method, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            if len(data) > self._max_message_bytes:
                raise ResourceExhaustedError(
                    f"the message has {len(data)} bytes, at most {self._max_message_bytes} are allowed",
                    code="GS_TOO_LARGE",
                )
            self._way.received += len(data)
            yield await method.read(data)


def _method(service: Service, method: MethodDescriptor) -> _Method:
    codec = service.codecs.get(method.name, Codec())
    read = RequestReader(method.input_type, codec.decoder).read
    return _Method(method, service.handle(method), read, codec.encode or encode_message)


async def _only(messages: AsyncIterator[Any]) -> Any:
    async for message in messages:
        return message
    raise InvalidArgumentError("expected a message, got none")


def _as_client_sees(error: ServiceError) -> GradserveError:
    """Returns the error that a client makes of the status of another one."""
    return error_from_reply(grpc.StatusCode[status_code(error)], status_message(error))


class InProcessServer(ServerThread):
    """Runs a real server in a thread of this process, without ports and sockets, until the end of the block.

    with InProcessServer() as server, gradserve.connect(server.address) as client:
        server.faults.drop_reply("PushPull")

    Only clients of this process can connect to its address, "in-process:NAME", with `gradserve.connect` and
    `gradserve.aio.connect`. Calls pass all of the server but what listens, and have the messages that gRPC would carry.

    Attributes:
        faults: The faults of this server; none until some are planted.
    """

    _make_listener = InProcessListener

    def __init__(self, **settings: Any) -> None:
        """Makes a server, which starts with the block.

        Args:
            **settings: The settings of `gradserve serve`; see `ServerThread`.

        Raises:
            InvalidArgumentError: There is no such setting, or its value is not valid.
        """
        super().__init__(**{"bulk_listen": "off", "shared_memory_socket": "off", **settings})
