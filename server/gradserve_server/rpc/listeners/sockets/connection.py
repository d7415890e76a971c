"""A connection to a socket: opens it, and serves one call after the other."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

import gradserve
from gradserve_protocol.frames import (
    PROTOCOL,
    SEGMENT_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    pack_segments,
    split_name,
)
from gradserve_protocol.gpu import HANDLE_BYTES
from gradserve_protocol.tensors import Contents, WithContents, encode_message, tensors_beside
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.devices.device import Array, GpuSharing, SharingError
from gradserve_server.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.observe.calls import Origin
from gradserve_server.resources.budget import Reservation
from gradserve_server.rpc.boundary.chain import Call, StreamedReply, origin
from gradserve_server.rpc.boundary.status import status_message, unimplemented
from gradserve_server.rpc.listeners.sockets.context import Method, SocketContext, Strands
from gradserve_server.rpc.listeners.sockets.payloads import (
    ClientRegions,
    PayloadReceiver,
    ServerRegions,
    check_payload_bytes,
)
from gradserve_server.rpc.listeners.sockets.stream import FrameStream, SilentError
from gradserve_server.rpc.sockets.service import Grant
from gradserve_server.runtime.event_loop import EagerCall
from gradserve_server.security.identity import Credentials
from gradserve_server.tensors.payload import NO_PAYLOAD, TooSlowError

_log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_MAX_HELLO_BYTES = 4096
_SHORT_HEAD_BYTES = 64 << 10
"""Heads of calls up to this length do not wait for room: a connection takes about as much anyway."""


class _LeftError(Exception):
    """The client has abandoned the connection."""


class Connection:
    """Serves a connection until its client leaves or breaks the rules."""

    def __init__(self, stream: FrameStream, context: SocketContext, *, has_regions: bool) -> None:
        """Takes over a stream; with `has_regions`, client and server can read each other's memory in place."""
        self._stream = stream
        self._context = context
        self._has_regions = has_regions
        self._way = context.traffic.shared_memory if has_regions else context.traffic.bulk
        self._client_regions = ClientRegions(context.fair)
        self._count: Reservation | None = None
        """The identity for which the connection counts, once it is open."""
        self._server_regions = ServerRegions()
        self._grant: Grant | None = None
        self._credentials: Callable[[], Credentials] = Credentials
        self._gpu: GpuSharing | None = None
        """Opens the client's GPU memory; None if it may not hand over any."""
        self._gave_up = False
        self._strands = Strands(context.fair.strands)
        self._strand_key = b""
        self._is_strand = False
        self._payloads = PayloadReceiver(stream, context, self._client_regions)
        self.is_idle = True
        """True while no call is in flight."""

    async def serve(self) -> None:
        """Answers calls until the connection ends, or the server drains. Expects `close` afterwards."""
        try:
            await self._open()
            while not self._is_strand and self._context.admission.is_open:
                await self._next_frame()
        except (_LeftError, EOFError, OSError) as error:
            _log.debug("a client left its connection: %s", error)
        except FrameError as error:
            _log.debug("a connection broke the rules: %s", error)
            await self._refuse(InvalidArgumentError(str(error)))
        except SilentError as error:
            await self._refuse(DeadlineExceededError(str(error)))
        except TooSlowError as error:
            await self._refuse(UnavailableError(str(error)))  # it may try again, behind those that wait
        except ServiceError as error:
            await self._refuse(error)

    @property
    def is_open(self) -> bool:
        """True once the client has shown its ticket."""
        return self._grant is not None

    def dismiss(self, error: ServiceError) -> None:
        """Tells the client why the connection ends, even during a call. Does not wait."""
        self._stream.end_with(_error_frame(status_message(error)))

    def close(self) -> None:
        """Closes the socket, and releases everything that belongs to the connection."""
        if self._grant is not None and self._has_regions:
            self._context.readers.count -= 1
        self._server_regions.close()
        self._client_regions.close()
        if self._count is not None:
            self._count.settle(0)
        self._context.strand_keys.revoke(self._strand_key)
        self._strands.close()
        if not self._is_strand:
            self._stream.close()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                await self._stream.open()
                header = await self._stream.read_header()
                if header.kind is not FrameKind.HELLO or header.number != PROTOCOL:
                    raise FrameError("expected HELLO as the first frame")
                if header.name_bytes or header.payload_bytes or header.message_bytes > _MAX_HELLO_BYTES:
                    raise FrameError("expected HELLO with a short message and nothing else")
                message = bytes(await self._stream.read(header.message_bytes))
        except TimeoutError:
            raise DeadlineExceededError(f"no HELLO came within {_HELLO_SECONDS:g} s") from None
        try:
            hello = messages_pb2.Hello.FromString(message)
        except DecodeError as error:
            raise FrameError(f"expected a Hello: {error}") from None
        self._context.admission.check()
        if hello.strand_key:
            return await self._become_strand(hello)
        grant = self._context.tickets.redeem(hello.ticket, hello.client_id, self._stream.peer)
        shown = replace(grant.credentials, uid=self._stream.peer_uid(), user_key="")
        identity = self._context.identify(shown)
        self._count = self._context.fair.open(identity)
        self._client_regions.owner = identity
        self._credentials = lambda: shown
        self._grant = grant
        if self._has_regions:
            self._context.readers.count += 1
            welcome = messages_pb2.Welcome(user_key=self._context.user_key(shown), takes_metadata=True)
            self._offer_gpu(welcome)
        else:
            self._strand_key = self._context.strand_keys.issue(self._strands)
            welcome = messages_pb2.Welcome(strand_key=self._strand_key, takes_metadata=True)
        message = welcome.SerializeToString()
        return await self._stream.write([FrameHeader(FrameKind.REPLY, message_bytes=len(message)).pack() + message])

    def _offer_gpu(self, welcome: messages_pb2.Welcome) -> None:
        """Adds the GPU whose memory the client may hand over, or the reason why it may not."""
        gpu = self._context.gpu
        welcome.why_no_gpu = gpu.why_not(self._stream.peer_uid(), self._stream.peer_pid())
        if gpu.sharing is not None and not welcome.why_no_gpu:
            welcome.gpu = gpu.sharing.uuid
            self._gpu = gpu.sharing

    async def _become_strand(self, hello: messages_pb2.Hello) -> None:
        if self._has_regions:
            raise InvalidArgumentError("expected a strand over TCP, got a Unix socket", field="strand_key")
        if self._stream.has_more:
            raise FrameError("expected a strand to send nothing before it is welcome")
        strands = self._context.strand_keys.strands_of(hello.strand_key)
        self._stream.ignore()
        strands.add(hello.strand, self._stream)
        self._is_strand = True
        await self._stream.write([FrameHeader(FrameKind.REPLY).pack()])

    async def _next_frame(self) -> None:
        header = await self._stream.read_header()
        kind = header.kind
        if kind is FrameKind.CALL:
            self.is_idle = False
            self._server_regions.begin_call()
            await self._call(header)
            self.is_idle = True
            return
        if kind in (FrameKind.HELLO, FrameKind.REPLY):
            raise FrameError(f"expected a call, got {kind.name}")
        if header.has_more and kind is not FrameKind.GPU_REGION:
            raise FrameError(f"expected {kind.name} to be a header and nothing else")
        if kind is FrameKind.REGION:
            await self._add_region(header)
        elif kind is FrameKind.GPU_REGION:
            await self._add_gpu_region(header)
        elif kind is FrameKind.DROP:
            self._client_regions.drop(header.number)
        else:
            self._server_regions.release(header)

    async def _add_region(self, header: FrameHeader) -> None:
        descriptor = self._stream.take_descriptor()
        if descriptor is None:
            raise FrameError("expected REGION with a descriptor, over a Unix socket")
        try:
            self._client_regions.add(header.number, header.size, descriptor)
        except ResourceExhaustedError as error:
            await self._reply_error(error)
        else:
            await self._stream.write([FrameHeader(FrameKind.REPLY).pack()])
        finally:
            os.close(descriptor)

    async def _add_gpu_region(self, header: FrameHeader) -> None:
        gpu = self._gpu
        if gpu is None:
            raise FrameError("expected no memory of a GPU, as the answer to HELLO names none")
        if header.name_bytes or header.payload_bytes or header.message_bytes > _MAX_HELLO_BYTES:
            raise FrameError("expected GPU_REGION with a short message and nothing else")
        region = _gpu_region(bytes(await self._stream.read(header.message_bytes)))
        regions, run = self._client_regions, self._context.compute.run_in_thread
        is_first = regions.event is None
        if bool(region.event) is not is_first:
            raise FrameError("expected an event with the first GPU_REGION of a connection, and with no other")
        try:
            event = await run(gpu.open_event, region.event) if is_first else regions.event
            await regions.add_on_gpu(header.number, header.size, partial(self._open_memory, gpu, region, header.size))
        except ResourceExhaustedError as error:
            await self._reply_error(error)
        except SharingError as error:
            await self._reply_error(InvalidArgumentError(str(error)))
        else:
            regions.event = event
            await self._stream.write([FrameHeader(FrameKind.REPLY).pack()])

    async def _open_memory(self, gpu: GpuSharing, region: messages_pb2.GpuRegion, num_bytes: int) -> Array:
        # As the result of the thread's work, the memory would stay open until the next garbage collection.
        opened: list[Array] = []
        run = self._context.compute.run_in_thread
        await run(lambda: opened.append(gpu.open_memory(region.handle, region.buffer_id, num_bytes)))
        return opened.pop()

    async def _call(self, header: FrameHeader) -> None:
        if header.message_bytes > self._context.max_message_bytes:
            raise ResourceExhaustedError(
                f"the message has {header.message_bytes} bytes, at most {self._context.max_message_bytes} are allowed",
                code="GS_TOO_LARGE",
            )
        assert self._grant is not None
        allowed = self._grant.max_payload_bytes if self._grant.to_server else 0
        check_payload_bytes(header.payload_bytes, allowed)
        self._stream.strands = self._strands.first(header.code) if header.code else ()
        deadline = time.monotonic() + header.number * 1e-6 if header.number else None
        head = await self._read_head(header)
        method = self._context.methods.get(bytes(head[: header.name_bytes]))
        where = self._origin
        if method is None:
            name, metadata = split_name(bytes(head[: header.name_bytes]))
            method = self._context.methods.get(name)
            where = partial(origin, self._stream.peer_name(), metadata)
        try:
            payload = await self._payloads.open(
                header,
                head,
                allowed,
                in_place=method is None or method.reads_in_place,
                is_kept=method is not None and method.keeps,
            )
        except (ServiceError, MemoryError) as failure:
            no_memory = ResourceExhaustedError("the server has no memory left for this call", code="GS_NO_MEMORY")
            error = failure if isinstance(failure, ServiceError) else no_memory
            if method is not None:
                self._context.refuse(method.descriptor, where, error)
            return await self._reply_error(error)
        if method is None:
            try:
                await self._payloads.fill()
            finally:
                payload.close()
            return await self._reply_status(
                unimplemented(
                    f"no method {name.decode(errors='replace')!r} on this socket of gradserve {gradserve.__version__}"
                )
            )
        message = bytes(head[header.head_bytes - header.message_bytes :])
        self._way.calls += 1
        self._way.received += header.message_bytes + payload.num_bytes
        call = Call(
            method.name,
            deadline,
            payload,
            carries_results=self._grant.to_client,
            streams_results=self._grant.to_client and not self._stream.strands,
            peer=self._grant.peer,
            credentials=self._credentials,
            origin=where,
            prepare=partial(self._payloads.prepare_on_gpu, in_place=method.reads_gpu_in_place)
            if payload.on_gpu
            else None,
        )
        try:
            return await self._answer(method, message, call)
        except BaseException:
            call.lose()
            raise
        finally:
            call.end()

    def _origin(self) -> Origin:
        return Origin(self._stream.peer_name())

    async def _read_head(self, header: FrameHeader) -> memoryview:
        """Reads the bytes before the payload; if they are long, waits for room first."""
        num_bytes = header.head_bytes
        if num_bytes <= _SHORT_HEAD_BYTES:
            return await self._stream.read(num_bytes)
        messages, stream = self._context.messages, self._stream
        async with messages.hold(num_bytes):
            return await messages.senders.receive(stream.read(num_bytes), stream.num_arrived)

    async def _answer(self, method: Method, message: bytes, call: Call) -> None:
        failure: ServiceError | None = None
        try:
            try:
                request = await method.read(message)
            except InvalidArgumentError:
                await self._payloads.fill()
                raise
            if call.payload is NO_PAYLOAD:
                begun = EagerCall(method.handle(request, call))
            else:
                begun = await self._receive_and_begin(method, request, call)
            response = begun.result() if begun.is_done else await self._rest(begun, call)
        except TimeoutError:
            failure = DeadlineExceededError("the call's time limit has passed")
        except ServiceError as error:
            # Its frames refer to the client's memory, which would stay mapped until the next garbage collection.
            error.__traceback__ = error.__context__ = None
            failure = error
        finally:
            if call.payload is not NO_PAYLOAD:
                call.payload.close()
                if self._payloads.is_busy and (failure is None or self._payloads.is_lent):
                    # With the answer, whatever it is, the client gets its memory back.
                    await self._payloads.wait()
        if failure is not None:
            call.lose()
            return await self._reply_error(failure)
        return await self._reply(response, call)

    async def _receive_and_begin(self, method: Method, request: Any, call: Call) -> EagerCall[Any]:
        """Begins a call with a payload: once that has arrived, or earlier if it is large and the method can."""
        uses_payload = _uses_payload(request)
        if not (self._payloads.takes_time and method.begins_early and uses_payload):
            await self._payloads.fill()
            if not uses_payload:
                # A call that never looks at its payload would keep other payloads waiting for as long as it waits.
                call.payload.close()
            return EagerCall(method.handle(request, call))
        begun = asyncio.ensure_future(method.handle(request, call))
        try:
            await self._payloads.fill()
        except BaseException:
            begun.cancel()
            await asyncio.wait([begun])
            raise
        return EagerCall(begun)

    async def _rest(self, begun: EagerCall[Any], call: Call) -> Any:
        """Waits for the response of a call, unless the client gives the call up.

        Raises:
            TimeoutError: The time of the call is over.
            ServiceError: The call failed.
        """
        task = asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            # The client gives up the call by sending anything, or by leaving.
            self._stream.unwatch()
            self._gave_up = True
            task.cancel()

        self._stream.watch(give_up)
        try:
            async with asyncio.timeout(None if call.deadline is None else call.time_left()):
                response = await begun.rest()
        except asyncio.CancelledError:
            if not self._gave_up or task.cancelling() > 1:
                raise
            task.uncancel()
            raise _LeftError("it gave up a call") from None
        finally:
            self._stream.unwatch()
        if self._gave_up:
            raise _LeftError("it gave up a call that could no longer be cancelled")
        return response

    async def _reply(self, response: Any, call: Call) -> None:
        contents = Contents()
        assert self._grant is not None
        if isinstance(response, StreamedReply):
            return await self._reply_in_pieces(response, call)
        if not self._grant.to_client:
            message = encode_message(response)
        else:
            if isinstance(response, WithContents):
                response, contents = response.message, response.contents
            message = response.SerializeToString()
        if contents.num_bytes > self._grant.max_payload_bytes:
            return await self._reply_too_large(contents.num_bytes, call)
        if self._has_regions:
            placed = self._server_regions.place(contents.buffers)
            pieces, segments = placed.pieces, pack_segments(placed.segments)
            for frame in self._server_regions.forget_unused():
                await self._stream.write([frame])
            for block in placed.new:
                header = FrameHeader(FrameKind.REGION, number=block.number, size=block.num_bytes)
                await self._stream.write([header.pack()], block.descriptor)
        else:
            pieces, segments = contents.pieces(), b""
        self._way.sent += len(message) + contents.num_bytes
        header = FrameHeader(
            FrameKind.REPLY,
            message_bytes=len(message),
            payload_bytes=sum(map(len, pieces)),
            size=len(segments) // SEGMENT_BYTES,
        )
        await self._stream.write_frame(header.pack() + segments + message, pieces)
        return None

    async def _reply_in_pieces(self, reply: StreamedReply, call: Call) -> None:
        assert self._grant is not None
        if reply.num_bytes > self._grant.max_payload_bytes:
            return await self._reply_too_large(reply.num_bytes, call)
        message = reply.message.SerializeToString()
        self._way.sent += len(message) + reply.num_bytes
        header = FrameHeader(FrameKind.REPLY, message_bytes=len(message), payload_bytes=reply.num_bytes)
        await self._stream.write([header.pack() + message])
        try:
            async for piece in reply.pieces:
                await self._stream.write([piece])
        except OSError:
            raise
        except Exception:
            _log.exception("%s failed while its reply was leaving", call.method)
            self._context.on_fault()
            # The client expects the rest of the payload, and would take an error for a part of it.
            raise _LeftError("its reply could not be finished") from None
        return None

    async def _reply_too_large(self, num_bytes: int, call: Call) -> None:
        assert self._grant is not None
        error = ResourceExhaustedError(
            f"the result has {num_bytes} bytes, at most {self._grant.max_payload_bytes} are allowed "
            "by the ticket of this connection",
            code="GS_TOO_LARGE",
        )
        call.end(error)
        await self._reply_error(error)

    async def _reply_error(self, error: ServiceError) -> None:
        await self._reply_status(status_message(error))

    async def _reply_status(self, status: status_pb2.Status) -> None:
        await self._stream.write([_error_frame(status)])

    async def _refuse(self, error: ServiceError) -> None:
        """Tells the client why the connection ends, if it is still there."""
        with contextlib.suppress(OSError):
            await self._reply_error(error)
            self._stream.finish()


def _error_frame(status: status_pb2.Status) -> bytes:
    message: bytes = status.SerializeToString()
    return FrameHeader(FrameKind.REPLY, code=status.code, message_bytes=len(message)).pack() + message


def _uses_payload(request: Any) -> bool:
    return not isinstance(request, Message) or any(True for _ in tensors_beside(request))


def _gpu_region(message: bytes) -> messages_pb2.GpuRegion:
    try:
        region = messages_pb2.GpuRegion.FromString(message)
    except DecodeError as error:
        raise FrameError(f"expected a GpuRegion: {error}") from None
    if len(region.handle) != HANDLE_BYTES:
        raise FrameError(f"expected a handle of {HANDLE_BYTES} bytes, got {len(region.handle)}")
    if region.event and len(region.event) != HANDLE_BYTES:
        raise FrameError(f"expected the handle of an event of {HANDLE_BYTES} bytes, got {len(region.event)}")
    return region
