"""The parts that all connections to a server's sockets share: methods, limits, access to the GPU, keys of strands."""

import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from numpy.typing import NDArray

from gradserve_protocol.frames import MAX_STRANDS, FrameError
from gradserve_server.config import GpuSharingUsers
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import GpuSharing
from gradserve_server.devices.host.shared_blocks import Readers, SharedMemory
from gradserve_server.errors import InvalidArgumentError, NotFoundError, ServiceError
from gradserve_server.observe.calls import Origin, WireTraffic
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.rpc.boundary.chain import Handle, Service
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.boundary.messages import RequestReader
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.rpc.sockets.service import TicketRegistry
from gradserve_server.security.identity import Credentials, Identity, ShareRules
from gradserve_server.tensors.payload import InFlight

_ON_GRPC_ONLY = frozenset({"gradserve.v1.SocketService.IssueTicket", "gradserve.v1.LeaseService.HoldClientLease"})
_ADDING_GRADIENTS = frozenset(
    {
        "gradserve.v1.AccumulatorService.ApplyGradient",
        "gradserve.v1.AccumulatorService.PushPull",
        "gradserve.v1.AccumulatorService.StageGradient",
        "gradserve.v1.ParameterService.Push",
        "gradserve.v1.ParameterService.PushPullParameters",
        "gradserve.v1.ParameterService.StageUpdate",
    }
)
_WAITING_FOR_PAYLOAD = _ADDING_GRADIENTS | {"gradserve.v1.TensorService.StoreTensors"}
_WITH_GPU_MEMORY = frozenset({"gradserve.v1.TensorService.StoreTensors", "gradserve.v1.TensorService.ReadTensors"})
_OPS = "gradserve.v1.GradientOpsService."
_OPS_WITH_LENGTHS = f"{_OPS}CudnnRNN"
"""The prefix of ops that check some inputs before they use them: lengths, and what their own forward has left."""
_STRAND_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method.

    Attributes:
        name: The full name.
        descriptor: The descriptor.
        read: Reads a request.
        handle: Answers a call.
        reads_in_place: Whether it may read tensors in memory that the client can change during the call.
        begins_early: Whether it may begin before a large payload has arrived.
        reads_gpu_in_place: Whether it may use tensors in GPU memory that the client can change during the call.
        keeps: Whether its payload stays in memory while it waits for those of other calls.
    """

    name: str
    descriptor: MethodDescriptor
    read: Callable[[bytes], Awaitable[Any]]
    handle: Handle
    reads_in_place: bool
    begins_early: bool
    reads_gpu_in_place: bool
    keeps: bool


def methods_of(services: Sequence[Service]) -> Mapping[bytes, Method]:
    """Returns the methods that can be called on a socket, by name."""
    found = {}
    for service in services:
        for method in service.descriptor.methods:
            if method.client_streaming or method.server_streaming or method.full_name in _ON_GRPC_ONLY:
                continue
            adds_gradients = method.full_name in _ADDING_GRADIENTS
            keeps = adds_gradients and service.keeps_gradients
            found[method.full_name.encode()] = Method(
                method.full_name,
                method,
                RequestReader(method.input_type).read,
                service.handle(method),
                reads_in_place=adds_gradients and not keeps,
                begins_early=method.full_name in _WAITING_FOR_PAYLOAD,
                reads_gpu_in_place=_reads_gpu_in_place(method.full_name) and not keeps,
                keeps=keeps,
            )
    return found


def _reads_gpu_in_place(name: str) -> bool:
    if name.startswith(_OPS):
        return not name.startswith(_OPS_WITH_LENGTHS)
    return name in _ADDING_GRADIENTS or name in _WITH_GPU_MEMORY


class FairSockets:
    """Limits connections, strands and the regions of clients, with fair shares for identities.

    Used on the event loop only.
    """

    def __init__(
        self, max_connections: int, region_bytes: int, gpu_region_bytes: int, max_regions: int, rules: ShareRules
    ) -> None:
        self.region_bytes = Budget(
            region_bytes,
            "bytes of clients' shared memory",
            rules,
            of_identity=lambda own: own.max_region_bytes,
            code="GS_MEMORY",
        )
        self.gpu_bytes = Budget(gpu_region_bytes, "bytes of clients' GPU memory", rules, code="GS_MEMORY")
        self.regions = Budget(max_regions, "regions of clients' shared memory", rules)
        self.connections = Budget(
            max_connections, "connections to sockets", rules, of_identity=lambda own: own.max_connections
        )
        self.strands = Budget(max_connections, "strands of connections to sockets")

    def open(self, identity: Identity) -> Reservation:
        """Counts a connection until the reservation is closed.

        Raises:
            ResourceExhaustedError: The identity has too many connections.
        """
        connection = self.connections.reserve(owner=identity)
        connection.expect(1)
        connection.settle(1)  # the listener keeps the limit of all
        return connection

    @contextmanager
    def region(self, identity: Identity, num_bytes: int, *, on_gpu: bool) -> Iterator[None]:
        """Counts a region during a block.

        Raises:
            ResourceExhaustedError: The regions of the identity, or of everybody, would be too many or too large.
        """
        memory = self.gpu_bytes if on_gpu else self.region_bytes
        with self.regions.reserve(1, owner=identity), memory.reserve(num_bytes, owner=identity):
            yield


@dataclass(frozen=True)
class GpuAccess:
    """The rule that says whose GPU memory the server opens.

    Attributes:
        sharing: Opens the memory; None if there is no GPU.
        users: The users whose processes may hand over memory.
    """

    sharing: GpuSharing | None
    users: GpuSharingUsers

    def why_not(self, uid: int | None, pid: int | None) -> str:
        """Returns why a user's process may not hand over memory; empty if it may."""
        if self.users == "off":
            return "the server does not allow it (gpu_sharing: off)"
        if self.sharing is None:
            return "the server computes on the CPU, or its driver does not say on which GPU"
        if pid == os.getpid():
            return "the server is in the same process, where CUDA does not open its handles"
        if self.users == "user" and uid != os.getuid():
            return "the server is another user's, and allows it to that user only (gpu_sharing: user)"
        return ""


class Strands:
    """The strands of one connection: further sockets over which its large payloads are split."""

    def __init__(self, strands: Budget) -> None:
        self._count = strands.reserve()
        self._streams: dict[int, FrameStream] = {}

    def add(self, number: int, stream: FrameStream) -> None:
        """Takes over a stream.

        Raises:
            InvalidArgumentError: The number is out of range or taken.
            ResourceExhaustedError: There are too many strands.
        """
        if not 0 < number <= MAX_STRANDS:
            raise InvalidArgumentError(f"expected 1 to {MAX_STRANDS}, got {number}", field="strand")
        if number in self._streams:
            raise InvalidArgumentError(f"strand {number} is there already", field="strand")
        self._count.grow(1)
        self._streams[number] = stream

    def first(self, count: int) -> list[FrameStream]:
        """Returns the first `count` strands.

        Raises:
            FrameError: There are fewer.
        """
        try:
            return [self._streams[number] for number in range(1, count + 1)]
        except KeyError as error:
            raise FrameError(f"expected a call over strands that are open, strand {error} is not") from None

    def close(self) -> None:
        """Closes all strands."""
        while self._streams:
            self._streams.popitem()[1].close()
        self._count.settle(0)


class StrandKeys:
    """The keys that turn new sockets into strands of a connection. Used on the event loop only."""

    def __init__(self) -> None:
        self._strands: dict[bytes, Strands] = {}

    def issue(self, strands: Strands) -> bytes:
        """Returns a key to the strands of a connection, until it is revoked."""
        key = secrets.token_bytes(_STRAND_KEY_BYTES)
        self._strands[key] = strands
        return key

    def revoke(self, key: bytes) -> None:
        """Forgets a key."""
        self._strands.pop(key, None)

    def strands_of(self, key: bytes) -> Strands:
        """Returns the strands of a connection.

        Raises:
            NotFoundError: There is no such key.
        """
        strands = self._strands.get(key)
        if strands is None:
            raise NotFoundError("no such connection: it has ended, or belongs to another server", field="strand_key")
        return strands


@dataclass(frozen=True, kw_only=True)
class SocketContext:
    """The parts that all connections share.

    Attributes:
        methods: The methods that can be called, by name.
        tickets: The tickets that open connections.
        admission: Admits calls until the server drains.
        memory: The budget of the bytes of tensors.
        fair: Limits connections and regions.
        in_flight: Limits the payloads that are arriving.
        messages: Limits the long messages that are arriving.
        allocate: Returns uninitialized memory.
        compute: Copies large tensors.
        shared_memory: Makes the server's regions.
        readers: Counts the clients that read averages in place.
        max_message_bytes: The longest message, without its payload.
        identify: Returns the identity with some credentials; raises UnauthenticatedError if there is none.
        user_key: Returns the key that lets the user of a connection make calls over gRPC; empty if none is needed.
        on_fault: Called after a fault of the server that no answer can report.
        traffic: Counts bytes and calls.
        refuse: Counts calls whose payloads cannot be received; takes the method, the origin and the error.
        gpu: The GPU of the ops, for clients that have tensors on it.
        strand_keys: The keys of connections that can get strands.
    """

    methods: Mapping[bytes, Method]
    tickets: TicketRegistry
    admission: Admission
    memory: Budget
    fair: FairSockets
    in_flight: InFlight
    messages: InFlight
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
    compute: Compute
    shared_memory: SharedMemory
    readers: Readers
    max_message_bytes: int
    identify: Callable[[Credentials], Identity]
    user_key: Callable[[Credentials], str]
    on_fault: Callable[[], object]
    gpu: GpuAccess
    traffic: WireTraffic
    refuse: Callable[[MethodDescriptor, Callable[[], Origin], ServiceError], None]
    strand_keys: StrandKeys = field(default_factory=StrandKeys)
