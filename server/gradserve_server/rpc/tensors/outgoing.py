"""The tensors of replies: inline, beside the message, or kept on the server under handles, as the request wants."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from google.protobuf.message import Message

from gradserve_protocol.arrays import HOST_ARRAYS
from gradserve_protocol.tensors import Contents, WithContents
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.devices.compute import FEW_PIECES, Compute
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError, request_fields
from gradserve_server.resources.memory import Memory
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import decode_duration
from gradserve_server.rpc.boundary.messages import Piece, assembled
from gradserve_server.rpc.tensors.messages import encode_handle
from gradserve_server.tensors.receipts import check_receipt
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.store import TensorStore

_INLINE, _KEEP, _AUTO = (
    tensor_pb2.Placement.MODE_INLINE,
    tensor_pb2.Placement.MODE_KEEP,
    tensor_pb2.Placement.MODE_AUTO,
)
_MODES = {tensor_pb2.Placement.MODE_UNSPECIFIED: _INLINE, _INLINE: _INLINE, _KEEP: _KEEP, _AUTO: _AUTO}


@dataclass(frozen=True)
class InlineLimits:
    """Limits for inline tensors, in bytes.

    Attributes:
        small: The most bytes inline with MODE_AUTO.
        message: The most bytes inline in any mode.
    """

    small: int
    message: int


@dataclass(frozen=True)
class TensorDeliverer:
    """Begins the delivery of replies' tensors.

    Attributes:
        store: Keeps tensors under handles.
        residence: Copies tensors to the host.
        compute: Encodes replies with many tensors.
        memory: The memory of results.
        limits: The limits of inline tensors.
    """

    store: TensorStore
    residence: Residence
    compute: Compute
    memory: Memory
    limits: InlineLimits

    def begin(self, placement: tensor_pb2.Placement, call: Call) -> "OutgoingTensors":
        """Checks where a request wants the tensors of its reply; returns a context manager that takes them.

        Raises:
            InvalidArgumentError: The mode is unknown, the lease is not positive, or the receipt is too long.
        """
        if placement.mode not in _MODES:
            raise InvalidArgumentError(f"expected a known placement mode, got {placement.mode}", field="placement.mode")
        lease = decode_duration(placement, "lease")
        if lease is not None:
            with request_fields({"lease": "placement.lease"}):
                self.store.lease_seconds(lease)
        receipt = check_receipt(placement.receipt, "placement.receipt")
        return OutgoingTensors(self, _MODES[placement.mode], lease, receipt, call)


class OutgoingTensors:
    """The tensors of one reply. If the block fails or the reply cannot be sent, none of them stays on the server.

    Attributes:
        room: Memory that the call has reserved for them. Stored tensors take it over; the rest is freed at the end.
        handles: The handles of those that are kept.
    """

    def __init__(
        self,
        deliverer: TensorDeliverer,
        mode: "tensor_pb2.Placement.Mode",
        lease: float | None,
        receipt: bytes,
        call: Call,
    ) -> None:
        self.room = deliverer.memory.room_of_call(call.identity)
        self.handles: list[str] = []
        self._deliverer = deliverer
        self._mode = mode
        self._lease = lease
        self._receipt = receipt
        self._call = call
        self._is_attached = call.carries_results and mode != _KEEP
        self._arrays: list[Array] = []
        self._keeps: bool | None = None

    @property
    def compute(self) -> Compute:
        """Runs what takes long for many tensors."""
        return self._deliverer.compute

    def keeps(self, num_bytes: int) -> bool:
        """Returns True if the tensors stay on the server. The first size, which may be an upper bound, decides for all.

        Raises:
            ResourceExhaustedError: They must come inline and are too large for that.
        """
        if self._keeps is None:
            limits = self._deliverer.limits
            keeps = self._mode == _KEEP or (self._mode == _AUTO and num_bytes > limits.small)
            self._keeps = keeps and not self._is_attached
            if not self._keeps and not self._is_attached and num_bytes > limits.message:
                raise ResourceExhaustedError(
                    f"the result has {num_bytes} bytes, but at most {limits.message} come inline; "
                    "ask for placement MODE_KEEP or MODE_AUTO",
                    field="placement.mode",
                )
        return self._keeps

    async def add(self, arrays: Sequence[Array], *, shared: bool = False) -> None:
        """Takes any number of arrays, in any memory; those that leave the server are copied to the host.

        Takes no turn of the event loop unless they are many or have to be copied.

        Args:
            arrays: The arrays.
            shared: Whether their memory is also referenced elsewhere.

        Raises:
            ResourceExhaustedError: They must be kept and do not fit, or come inline and are too large for that.
            MemoryError: There is not enough memory on the host.
        """
        if self.keeps(sum([array.nbytes for array in arrays])):
            owner = self.room.owner
            self.handles += await self._deliverer.store.keep(
                arrays, self._lease, shared=shared, room=self.room, owner=owner, receipt=self._receipt
            )
        elif [array for array in arrays if not isinstance(array, HOST_ARRAYS)]:
            arrays = await self._deliverer.residence.copy_to_host(arrays)
        self._arrays += arrays

    async def reply(
        self,
        response: Message,
        pieces: Callable[[Iterator[tensor_pb2.Tensor]], Iterable[Piece]],
        contents: Contents | None = None,
    ) -> WithContents:
        """Returns the reply with the tensors.

        Args:
            response: A response, without tensors.
            pieces: A function that takes the messages of the tensors, in order, and returns the rest of the response.
                It runs in a thread if they are many.
            contents: Empty contents for the reply.
        """
        contents = Contents() if contents is None else contents
        tensors: Iterator[tensor_pb2.Tensor]
        if self._keeps:
            tensors = map(encode_handle, self._arrays, self.handles)
        else:
            tensors = each_inline(self._arrays, contents, is_attached=self._is_attached)
        message = await assembled(self.compute, len(self._arrays), response, pieces(tensors))
        if self.handles:
            self._call.undelivered.append(partial(self._deliverer.store.delete, self.handles))
        return WithContents(message, contents)

    def __enter__(self) -> Self:
        """Returns the tensors."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Deletes stored tensors after an error; frees the rest of the reserved memory."""
        if error is not None:
            self._deliverer.store.delete(self.handles)
        self.room.settle()


def each_inline(arrays: Sequence[Array], contents: Contents, *, is_attached: bool) -> Iterator[tensor_pb2.Tensor]:
    """Returns the messages of arrays that leave with a reply, for `assembled`.

    Args:
        arrays: The arrays, in host memory.
        contents: The contents beside the reply.
        is_attached: Whether contents of any size travel beside the reply.
    """
    if len(arrays) <= FEW_PIECES:
        return iter(contents.tensors(arrays))
    # For gRPC, a message with contents beside it could not be serialized in parts.
    return contents.each_tensor(arrays, beside=is_attached)
