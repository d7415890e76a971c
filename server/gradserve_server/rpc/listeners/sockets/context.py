"""What all connections to the sockets of a server share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from numpy.typing import NDArray

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.host.shared_blocks import Readers, SharedMemory
from gradserve_server.errors import ServiceError
from gradserve_server.observe.call_record import Origin
from gradserve_server.observe.calls import WireTraffic
from gradserve_server.resources.quotas import Quota
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.listeners.sockets.fair_sockets import FairSockets
from gradserve_server.rpc.listeners.sockets.gpu_access import GpuAccess
from gradserve_server.rpc.listeners.sockets.methods import Method
from gradserve_server.rpc.listeners.sockets.strands import StrandKeys
from gradserve_server.rpc.sockets.tickets import TicketOffice
from gradserve_server.security.credentials import Credentials
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.inflight import InFlight


@dataclass(frozen=True, kw_only=True)
class SocketContext:
    """What all connections share.

    Attributes:
        methods: The methods that can be called, by name.
        tickets: The tickets that open connections.
        admission: Admits calls until the server drains.
        memory: The quota of bytes of tensors.
        fair: The connections and regions of all clients.
        in_flight: Bounds the payloads that are arriving.
        messages: Bounds the long messages that are arriving.
        allocate: Returns uninitialised memory.
        compute: Copies large tensors.
        shared_memory: Makes the server's regions.
        readers: Counts the clients that read averages in place.
        max_message_bytes: The longest message, without its payload.
        identify: Returns who has shown some credentials; raises UnauthenticatedError if nobody has these.
        user_key: Returns the key with which the user of a connection makes calls over gRPC; empty if it needs none.
        on_fault: Called after a fault of the server that no answer tells of.
        traffic: Counts bytes and calls.
        refuse: Notes calls whose payloads cannot be received: takes the method, where it came from, and the error.
        gpu: The GPU of the ops, for clients that have tensors on it.
        strand_keys: The keys to connections that get strands.
    """

    methods: Mapping[bytes, Method]
    tickets: TicketOffice
    admission: Admission
    memory: Quota
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
