"""One run of one server: its real registry and servicers, without sockets and threads."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.tensors import encode_message
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.accumulators.durable.restoring import restore_accumulators
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.config import LeaseConfig, LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.parameters.journal import ParametersJournals
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.restoring import restore_parameters
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.lifetimes import Expiry, Lifetimes
from gradserve_server.resources.memory import Memory
from gradserve_server.resources.registry import ServerRun
from gradserve_server.rpc.accumulators.replies import reply_codecs
from gradserve_server.rpc.accumulators.service import AccumulatorServicer
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.leases.service import LeaseServicer
from gradserve_server.rpc.parameters.replies import reply_codecs as parameter_codecs
from gradserve_server.rpc.parameters.service import ParameterServicer
from gradserve_server.rpc.services import SERVICES
from gradserve_server.rpc.tensors.messages import InlineLimits, TensorDeliverer
from gradserve_server.runtime.event_loop import ServiceClock
from gradserve_server.security.identity import ShareRules
from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.journal import Durability
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.tensors.store import TensorStore
from tests.accumulators.bench import Bench
from tests.simulation.clock import LONGEST_TICK
from tests.simulation.disk import SimulatedDisk
from tests.simulation.store import SimulatedStore

T = TypeVar("T")

CLIENT_LEASE = 4.0
UNDELIVERED_LEASE = 5.0
_EXPIRY_INTERVAL = 0.25
_OWNER: ContextVar["Run | None"] = ContextVar("owner", default=None)

METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}/{method.name}": method for service in SERVICES for method in service.methods
}


class Run:
    """A server from its start to its end.

    Attributes:
        place: Its place in the cluster.
        is_gone: Whether it has been killed.
        restored: The rounds whose averages it has kept from an earlier run, with the incarnations of accumulators.
        memory: The budget of bytes.
        registry: Its accumulators.
        parameters: Its parameters.
    """

    def __init__(
        self,
        place: Member,
        folder: Path | None,
        chance: random.Random,
        monotonic: Callable[[], float],
        wall_clock: Callable[[], int],
    ) -> None:
        self.place = place
        self.is_gone = False
        self.restored: frozenset[tuple[str, int]] = frozenset()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        run = ServerRun(lambda: f"{chance.getrandbits(128):032x}")
        clock = ServiceClock(monotonic, LONGEST_TICK)
        compute = InlineCompute()
        self.store = None
        self._journals: AccumulatorJournals | None = None
        self._parameters_journals: ParametersJournals | None = None
        if folder is not None:
            self.store = SimulatedStore(StateDirectory(folder), SimulatedDisk(folder, chance), chance)
            self._journals = AccumulatorJournals(self.store, Durability.ROUND)
            self._parameters_journals = ParametersJournals(self.store, Durability.ROUND)
        self.memory = Budget(1 << 40, "bytes of tensor memory", ShareRules())
        self._lifetimes = Lifetimes(clock, CLIENT_LEASE)
        self._bench = Bench(
            journals=self._journals,
            memory=self.memory,
            clock=clock,
            lifetimes=self._lifetimes,
            undelivered_lease_seconds=UNDELIVERED_LEASE,
            wall_clock=wall_clock,
            member=place,
        )
        self.registry: Any = self._bench.registry
        self.registry._new_incarnation = run.new_id
        self.registry._directory._is_of_another_run = run.is_of_another
        self.parameters = ParametersRegistry(
            AccumulatorFactory(
                places=self._bench.places,
                bookkeeping=self._bench.bookkeeping,
                limits=LimitsConfig(undelivered_lease_seconds=UNDELIVERED_LEASE),
                lifetimes=self._lifetimes,
                member=place,
            ),
            self._lifetimes,
            Stepper(ForkJoin(1)),
            new_incarnation=run.new_id,
            journals=self._parameters_journals,
            wall_clock=wall_clock,
            is_of_another_run=run.is_of_another,
            member=place,
            ordered=self.registry.ordered,
        )
        device = _device()
        tensors = TensorStore(
            pool=BufferPool(0),
            memory=Memory(self.memory),
            handles=Budget(1 << 20, "tensor handles", ShareRules()),
            leases=LeaseConfig(),
            clock=clock,
            new_handle=run.new_id,
        )
        residence = Residence(device, device, compute)
        deliverer = TensorDeliverer(tensors, residence, compute, Memory(self.memory), InlineLimits(1 << 20, 1 << 30))
        opener = TensorOpener(tensors, residence, compute)
        receiver = GradientReceiver(opener, compute, Reducer(ForkJoin(1)))
        identity = run.incarnation, place
        self._servicers: dict[str, Any] = {
            "AccumulatorService": AccumulatorServicer(self.registry, receiver, deliverer, compute, *identity),
            "ParameterService": ParameterServicer(self.parameters, opener, receiver, deliverer, compute, *identity),
            "LeaseService": LeaseServicer(self._lifetimes.clients),
            "ServerService": self,
        }
        self._codecs: dict[str, Any] = {**reply_codecs(), **parameter_codecs()}
        self._expiry = Expiry(
            clock,
            {
                "averages": self.registry.factory.expire,
                "versions": self.parameters.factory.expire,
                "accumulators": self._lifetimes.expire,
            },
            {},
            _EXPIRY_INTERVAL,
        )

    @property
    def used(self) -> tuple[int, int, int, int]:
        """The memory, the bookkeeping, the waiting calls and the accumulators that it counts."""
        return (
            self.memory.used,
            self._bench.bookkeeping.used,
            self.registry.factory.waiters.used + self.parameters.factory.waiters.used,
            self.registry.factory.count.used + self.parameters.factory.count.used,
        )

    async def start(self) -> None:
        """Restores what is on disk, and begins to serve."""
        if self.store is not None and self._journals is not None and self._parameters_journals is not None:
            await restore_accumulators(self._journals, self.registry, np.empty)
            await restore_parameters(self._parameters_journals, self.parameters, np.empty)
            self.store.start(lambda _: None)
        self.restored = frozenset(
            (accumulator.incarnation, each.round_number)
            for accumulator in self.at_home()
            for each in accumulator._averages.all_kept
        )
        self.begin(self._expiry.run())

    async def answer(self, name: str, data: bytes) -> bytes:
        """Answers a call, from the bytes of the request to those of the response.

        Raises:
            ServiceError: The call has failed.
        """
        service, method = METHODS[name].containing_service.name, METHODS[name]
        request = _message_class(method.input_type).FromString(data)
        call = Call(method.full_name)
        try:
            response = await getattr(self._servicers[service], method.name)(request, call)
            encode = self._codecs[method.name].encode if method.name in self._codecs else None
            return (encode or encode_message)(response)
        finally:
            call.end()

    async def GetServerInfo(  # noqa: N802  the name in the protos
        self, request: server_messages_pb2.GetServerInfoRequest, call: Call
    ) -> server_messages_pb2.GetServerInfoResponse:
        """Says which member of the cluster it is, and nothing else."""
        place = self.place
        member = server_messages_pb2.ClusterMember(cluster=place.cluster, index=place.index, size=place.size)
        return server_messages_pb2.GetServerInfoResponse(member=member)

    def accumulators(self) -> Iterator[Any]:
        """Yields its accumulators."""
        for _, each in self.registry._directory:
            yield each

    def at_home(self) -> Iterator[Any]:
        """Yields the accumulators whose home it is."""
        for key, each in self.registry._directory:
            if self.place.is_home(key):
                yield each

    # Its end

    def begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begins work of this server: it, and all work that it begins, ends with the server."""
        token = _OWNER.set(self)
        try:
            return asyncio.ensure_future(work)
        finally:
            _OWNER.reset(token)

    def kill(self) -> None:
        """Ends it at once: nothing more is written."""
        self.is_gone = True
        if self.store is not None:
            self.store.is_gone = True
        self.registry.close()  # so that nobody is served any more when tasks end
        self.parameters.close()

    async def bury(self) -> None:
        """Ends what is left of its tasks, and lets go of its files."""
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0)
        if self.store is not None:
            self.store.abandon()

    def _own(self, task: "asyncio.Task[Any]") -> None:
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        del self._tasks[task]
        if self.is_gone and not task.cancelled():
            task.exception()  # nobody is left who wants to know


def make_task(loop: asyncio.AbstractEventLoop, work: Any, **arguments: Any) -> "asyncio.Task[Any]":
    """Makes a task that belongs to the server that begins it, if one does: this is a task factory."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **arguments)
    owner = _OWNER.get()
    if owner is not None:
        owner._own(task)
    return task


@cache
def _device() -> CpuDevice:
    return CpuDevice(BufferPool(0))


@cache
def _message_class(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)


def response_class(name: str) -> Any:
    """Returns the class of the responses of a method."""
    return _message_class(METHODS[name].output_type)
