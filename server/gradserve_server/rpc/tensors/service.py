"""TensorService: uploads and downloads of tensors."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from functools import partial
from types import TracebackType
from typing import TypeAlias, TypeVar

from gradserve_protocol.arrays import PayloadError, buffer_of
from gradserve_protocol.frames import ALIGNMENT
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.tensors import Chunk, Contents, PartDecoder, WithContents, cut, encode_part
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.devices.device import Array, Device
from gradserve_server.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    request_fields,
)
from gradserve_server.limits import MAX_STREAM_TENSORS, check_count, quoted
from gradserve_server.resources.memory import Room
from gradserve_server.rpc.boundary.chain import Call, Codec, StreamedReply
from gradserve_server.rpc.boundary.fields import decode_duration, page_of
from gradserve_server.rpc.boundary.messages import Entries, Serialized, assembled
from gradserve_server.rpc.tensors.messages import (
    StreamedContents,
    decode_spec,
    decode_tensors,
    each_inline,
    encode_handle,
    encode_spec,
)
from gradserve_server.runtime.event_loop import BackgroundTasks, EagerCall, InTurns
from gradserve_server.tensors.held import HeldTensors, Receipt, Residence, check_receipt
from gradserve_server.tensors.incoming import IncomingTensors, TensorOpener
from gradserve_server.tensors.payload import InFlight, Payload, TooSlowError
from gradserve_server.tensors.spec import TensorSpec, num_bytes_of
from gradserve_server.tensors.store import StoredTensor, TensorStore
from gradserve_server.tensors.transfers import Arrived, Downloads, Landing, Uploads

STREAM_CODECS: Mapping[str, Codec] = {
    "PutTensors": Codec(decoder=PartDecoder),
    "GetTensors": Codec(encode=encode_part),
}


_SERIAL = re.compile("[0-9]{1,18}")

_StoringT = TypeVar("_StoringT", messages_pb2.PutTensorsResponse, messages_pb2.StoreTensorsResponse)
"""A response with the handles of stored tensors."""
_Putting: TypeAlias = messages_pb2.PutTensorsResponse | Serialized


class TensorServicer:
    """Serves a tensor store. The protos say what each method does."""

    def __init__(
        self,
        store: TensorStore,
        residence: Residence,
        downloads: Downloads,
        uploads: Uploads,
        opener: TensorOpener,
        in_flight: InFlight,
        compute: Compute,
        *,
        stream_idle_seconds: float,
        max_message_bytes: int,
        keeps_gradients: bool,
    ) -> None:
        self._store = store
        self._opener = opener
        self._in_flight = in_flight
        self._compute = compute
        self._max_message_bytes = max_message_bytes
        self._keeps_gradients = keeps_gradients
        self._residence = residence
        self._downloads = downloads
        self._uploads = uploads
        self._stream_idle_seconds = stream_idle_seconds
        self._tasks = BackgroundTasks()

    async def PutTensors(
        self, requests: AsyncIterator[messages_pb2.PutTensorsRequest | memoryview], call: Call
    ) -> _Putting:
        try:
            async with asyncio.timeout(self._stream_idle_seconds) as patience:
                return await self._receive(requests, patience, call)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the stream was silent for more than {self._stream_idle_seconds:g} s"
            ) from None
        except TooSlowError as error:
            raise UnavailableError(str(error)) from None

    async def _receive(
        self,
        requests: AsyncIterator[messages_pb2.PutTensorsRequest | memoryview],
        patience: asyncio.Timeout,
        call: Call,
    ) -> _Putting:
        loop = asyncio.get_running_loop()
        header = _header(await anext(requests, None))
        work = PIECE_BYTES * len(header.tensors)
        specs, lease = await self._compute.run(work, _decode_specs, header), decode_duration(header, "lease")
        receipt, owner = check_receipt(header.receipt, "header.receipt"), call.identity
        device = self._uploads.device(header.device, "header.device")
        patience.reschedule(None)
        num_bytes = await self._compute.run(work, num_bytes_of, specs)
        async with self._in_flight.hold(num_bytes) as place:
            patience.reschedule(loop.time() + self._stream_idle_seconds)
            async with self._uploads.room(device, num_bytes, owner) as room:
                receiving = self._store.receive(
                    specs, lease, owner=owner, allocate=device.empty, given=room, receipt=receipt
                )
                with request_fields({"lease": "header.lease"}), receiving as upload:
                    async with self._uploads.land(upload, device) as landing:
                        await self._take_parts(requests, landing, patience)
                        with _chunk_errors():
                            await landing.finish()
                    # A gradient that waits for others with its call must not keep these from arriving.
                    outlasts = header.for_next_call and not self._keeps_gradients
                    freed = place.outlast(len(specs)) if outlasts else None
                    handles = await self._store.store(upload, freed)
        return await self._answered(messages_pb2.PutTensorsResponse, specs, handles, call)

    async def _answered(
        self,
        response: type[_StoringT],
        tensors: Sequence[TensorSpec] | Sequence[Array],
        handles: Sequence[str],
        call: Call,
    ) -> _StoringT | Serialized:
        """Returns the response with the handles of tensors. If the call is given up, deletes the tensors."""
        try:
            entries = Entries("tensors", map(encode_handle, tensors, handles))
            reply = await assembled(self._compute, len(handles), response(), [entries])
        except BaseException:
            self._store.delete(handles)
            raise
        call.undelivered.append(partial(self._store.delete, handles))
        return reply

    async def _take_parts(
        self,
        requests: AsyncIterator[messages_pb2.PutTensorsRequest | memoryview],
        landing: Landing,
        patience: asyncio.Timeout,
    ) -> None:
        loop = asyncio.get_running_loop()
        num_parts = 0

        async def take_parts() -> None:
            nonlocal num_parts
            async for part in requests:
                num_parts += 1
                patience.reschedule(loop.time() + self._stream_idle_seconds)
                await _write(landing, part)

        def num_arrived() -> int:
            return landing.received_bytes + num_parts  # empty parts count as progress too

        await self._in_flight.senders.receive(take_parts(), num_arrived, in_messages=True)

    async def GetTensors(
        self, request: messages_pb2.GetTensorsRequest, call: Call
    ) -> AsyncIterator[messages_pb2.GetTensorsResponse | Serialized | Chunk]:
        _check_some(request.handles, "handle")
        handles, work = list(request.handles), PIECE_BYTES * len(request.handles)
        async with self._store.use(handles, release=request.release, user=call.identity) as inputs:
            arrays = await self._compute.run(work, _arrays_of, inputs, handles)
            header = ("header", [Entries("tensors", map(encode_spec, arrays))])
            yield await assembled(self._compute, len(arrays), messages_pb2.GetTensorsResponse(), [header])
            if await self._residence.is_on_host(arrays):
                chunks = cut(map(buffer_of, arrays))
                while (chunk := await self._compute.run(work, next, chunks, None)) is not None:
                    yield chunk
                return
            async with aclosing(self._downloads.pieces(arrays)) as pieces:
                async for piece in pieces:
                    for chunk in cut([piece]):
                        yield chunk

    async def StoreTensors(
        self, request: messages_pb2.StoreTensorsRequest, call: Call
    ) -> messages_pb2.StoreTensorsResponse | Serialized:
        _check_some(request.tensors, "tensor")
        lease, receipt = decode_duration(request, "lease"), check_receipt(request.receipt, "receipt")
        device = self._uploads.device(request.device, "device")
        work = PIECE_BYTES * len(request.tensors)
        tensors = await self._compute.run(work, _decode_tensors, request, call.payload)
        is_for_host = device is self._uploads.host
        arrives = not is_for_host and tensors.is_one_payload
        if not arrives:
            await call.payload.arrived()
        on_host = is_for_host and bool(request.device)
        async with self._opener.open(tensors, on_host=on_host):
            arrays: Sequence[Array] = list((await self._compute.run(work, tensors.arrays)).values())
            if tensors.is_partly_on_gpu and not on_host:
                arrays, handles = await self._copied(arrays, lease, receipt, call, stay=is_for_host)
            elif is_for_host:
                arrays, handles = await self._stored(arrays, tensors, lease, receipt, call)
            else:
                handles = await self._brought(
                    arrays, device, call.payload.arrived if arrives else _is_there, lease, receipt, call
                )
        return await self._answered(messages_pb2.StoreTensorsResponse, arrays, handles, call)

    async def _stored(
        self, arrays: Sequence[Array], tensors: IncomingTensors, lease: float | None, receipt: bytes, call: Call
    ) -> tuple[Sequence[Array], list[str]]:
        arrays = await self._owned(arrays)
        memory = next(iter(await self._compute.run(PIECE_BYTES * len(arrays), lambda: tensors.memory)), None)
        room = None if memory is None else Room(memory)
        handles = await self._store.keep(arrays, lease, shared=False, room=room, owner=call.identity, receipt=receipt)
        return arrays, handles

    async def _copied(
        self, arrays: Sequence[Array], lease: float | None, receipt: bytes, call: Call, *, stay: bool
    ) -> tuple[Sequence[Array], list[str]]:
        """Copies tensors, some of them in the client's GPU memory, on the GPU; those on the host may stay there."""
        gpu = self._uploads.device("auto", "device")
        num_bytes = sum([array.nbytes for array in arrays if not stay or gpu.holds(array)])
        async with self._uploads.room(gpu, num_bytes, call.identity) as room:
            copies = await (self._residence.copy(arrays) if stay else self._residence.copy_to_device(arrays))
            handles = await self._store.keep(
                copies, lease, shared=False, room=room, owner=call.identity, receipt=receipt
            )
        return copies, handles

    async def _brought(
        self, arrays: Sequence[Array], device: Device, arrived: Arrived, lease: float | None, receipt: bytes, call: Call
    ) -> list[str]:
        """Copies tensors to a device; tensors of a large payload while the rest is arriving."""
        work = PIECE_BYTES * len(arrays)
        specs = await self._compute.run(work, lambda: [TensorSpec(array.dtype, array.shape) for array in arrays])
        num_bytes = await self._compute.run(work, num_bytes_of, specs)
        async with self._uploads.room(device, num_bytes, call.identity) as room:
            receiving = self._store.receive(
                specs, lease, owner=call.identity, allocate=device.empty, given=room, receipt=receipt
            )
            with receiving as upload:
                await self._uploads.bring(upload, arrays, arrived)
                return await self._store.store(upload)

    async def _owned(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Returns arrays that nobody else refers to, and that can be deleted one by one.

        A single array that came as payload is taken over. Several share the memory of the payload, so they are copied.
        """
        if len(arrays) == 1 and arrays[0].flags.writeable:
            return arrays
        return await self._residence.copy(arrays)

    async def ReadTensors(self, request: messages_pb2.ReadTensorsRequest, call: Call) -> WithContents | StreamedReply:
        _check_some(request.handles, "handle")
        handles, work = list(request.handles), PIECE_BYTES * len(request.handles)
        async with AsyncExitStack() as using:
            held = await using.enter_async_context(
                self._store.use(handles, release=request.release, user=call.identity)
            )
            arrays = await self._compute.run(work, _arrays_of, held, handles)
            if request.into:
                return await self._write(arrays, request, call)
            if call.streams_results and not await self._residence.is_on_host(arrays):
                reply = await self._streamed(arrays, using)
                call.endings.append(_Ending(using.pop_all(), self._tasks))
                return reply
            arrays = await self._residence.copy_to_host(arrays)
            num_bytes = sum([array.nbytes for array in arrays])
            if not call.carries_results and num_bytes > self._max_message_bytes:
                raise ResourceExhaustedError(
                    f"the tensors have {num_bytes} bytes, but at most {self._max_message_bytes} come in one message; "
                    "use GetTensors",
                    field="handles",
                    code="GS_TOO_LARGE",
                )
            contents = Contents()
            tensors = each_inline(arrays, contents, is_attached=call.carries_results)
            response = await assembled(
                self._compute, len(arrays), messages_pb2.ReadTensorsResponse(), [Entries("tensors", tensors)]
            )
            # Until the reply has left, the memory is in use and counts.
            call.endings.append(_Ending(using.pop_all(), self._tasks))
        return WithContents(response, contents)

    async def _streamed(self, arrays: Sequence[Array], using: AsyncExitStack) -> StreamedReply:
        """Returns a reply with arrays, of which the first are already on their way to the host."""
        contents = StreamedContents()
        response = await self._compute.run(
            PIECE_BYTES * len(arrays), lambda: messages_pb2.ReadTensorsResponse(tensors=contents.tensors(arrays))
        )
        pieces = self._downloads.pieces(contents.arrays, alignment=ALIGNMENT)
        using.push_async_callback(pieces.aclose)
        first = await anext(pieces, memoryview(b""))
        return StreamedReply(response, contents.num_bytes, _chained(first, pieces))

    async def _write(
        self, arrays: Sequence[Array], request: messages_pb2.ReadTensorsRequest, call: Call
    ) -> WithContents:
        """Writes stored tensors into the client's GPU memory."""
        if len(request.into) != len(arrays):
            raise InvalidArgumentError(
                f"expected one place for each of the {len(arrays)} handles, got {len(request.into)}", field="into"
            )
        described = [(f"into[{index}]", each) for index, each in enumerate(request.into)]
        async with self._opener.open(decode_tensors(described, call.payload)) as places:
            targets = list(places.arrays().values())
            for place, array, target in zip(places, arrays, targets, strict=True):
                if not place.is_on_gpu:
                    raise InvalidArgumentError("expected a place in memory of the GPU", field=place.field)
                if (target.dtype, target.shape) != (array.dtype, array.shape):
                    raise InvalidArgumentError(
                        f"expected a place for shape {list(array.shape)} of {array.dtype}, got one for "
                        f"{list(target.shape)} of {target.dtype}",
                        field=place.field,
                    )
            call.payload.check_lender()
            await self._residence.fill(targets, arrays)
        return WithContents(messages_pb2.ReadTensorsResponse(), Contents())

    async def DeleteTensors(
        self, request: messages_pb2.DeleteTensorsRequest, call: Call
    ) -> messages_pb2.DeleteTensorsResponse:
        num_deleted = 0
        async for handle in InTurns(request.handles):
            num_deleted += self._store.delete([handle], user=call.identity)
        async for name in InTurns(request.receipts):
            num_deleted += self._store.receipts.redeem(Receipt(call.identity.name, check_receipt(name, "receipts")))
        return messages_pb2.DeleteTensorsResponse(num_deleted=num_deleted)

    async def ListTensors(
        self, request: messages_pb2.ListTensorsRequest, call: Call
    ) -> messages_pb2.ListTensorsResponse:
        page = page_of(request.page_size, request.page_token, default_size=1000)
        if page.after and not _SERIAL.fullmatch(page.after):
            raise InvalidArgumentError(
                f"expected the next_page_token of an earlier page, got {quoted(request.page_token)}", field="page_token"
            )
        found = self._store.page(int(page.after or 0), page.size + 1, user=call.identity)
        shown = found[: page.size]
        return messages_pb2.ListTensorsResponse(
            tensors=await self._compute.run(PIECE_BYTES * len(shown), lambda: list(map(_listed, shown))),
            next_page_token=page.next_token(str(shown[-1].serial) if shown else "", is_last=len(shown) == len(found)),
        )


class _Ending(AbstractContextManager[None]):
    """Ends the use of tensors after the reply; if they are many, in several steps on the event loop."""

    def __init__(self, using: AsyncExitStack, tasks: BackgroundTasks) -> None:
        self._using = using
        self._tasks = tasks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending = EagerCall(self._using.__aexit__(kind, error, traceback))
        if not ending.is_done:
            self._tasks.begin(ending.rest())


async def _chained(first: memoryview, rest: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
    yield first
    async for each in rest:
        yield each


def _listed(tensor: StoredTensor) -> messages_pb2.StoredTensor:
    return messages_pb2.StoredTensor(
        handle=tensor.handle,
        spec=encode_spec(tensor.spec),
        num_bytes=tensor.spec.num_bytes,
        lease_remaining=encode_duration(tensor.lease_remaining),
    )


def _arrays_of(held: HeldTensors, handles: Iterable[str]) -> list[Array]:
    return [held.arrays[handle] for handle in handles]


def _decode_tensors(request: messages_pb2.StoreTensorsRequest, payload: Payload) -> IncomingTensors:
    tensors = decode_tensors([(f"tensors[{index}]", each) for index, each in enumerate(request.tensors)], payload)
    if tensors.stored:
        field = f"{tensors.stored[0].field}.handle"
        raise InvalidArgumentError("expected the elements of a tensor, got a handle", field=field)
    return tensors


async def _is_there(_part: Array) -> None:
    """Returns at once: everything has arrived."""


def _check_some(things: Sized, what: str) -> None:
    if not len(things):
        raise InvalidArgumentError(f"expected at least one {what}, got none", field=f"{what}s")
    check_count(things, MAX_STREAM_TENSORS, f"{what}s", f"{what}s")


def _header(part: messages_pb2.PutTensorsRequest | memoryview | None) -> messages_pb2.PutTensorsHeader:
    if part is None or isinstance(part, memoryview) or not part.HasField("header"):
        given = "an empty stream" if part is None else "a chunk" if isinstance(part, memoryview) else "neither part"
        raise InvalidArgumentError(f"expected a header as the first message, got {given}", field="header")
    return part.header


def _decode_specs(header: messages_pb2.PutTensorsHeader) -> list[TensorSpec]:
    if not header.tensors:
        raise InvalidArgumentError("expected at least one tensor, got none", field="header.tensors")
    check_count(header.tensors, MAX_STREAM_TENSORS, "tensors", "header.tensors")
    return [
        decode_spec(tensor.dtype, tensor.shape, f"header.tensors[{index}]")
        for index, tensor in enumerate(header.tensors)
    ]


async def _write(landing: Landing, part: messages_pb2.PutTensorsRequest | memoryview) -> None:
    if not isinstance(part, memoryview):
        given = part.WhichOneof("part") or "neither part"
        raise InvalidArgumentError(f"expected a chunk after the header, got {given}", field="chunk")
    with _chunk_errors():
        await landing.write(part)


@contextmanager
def _chunk_errors() -> Iterator[None]:
    try:
        yield
    except PayloadError as error:
        raise InvalidArgumentError(str(error), field="chunk") from None
