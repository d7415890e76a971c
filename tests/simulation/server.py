"""One server on a simulated disk: the real registries, journals and stores, without sockets and threads."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.accumulators.durable.restoring import restore_accumulators
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.config import LeaseConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.journal import LayerJournals
from gradserve_server.layers.batch_norm.restoring import restore_layers
from gradserve_server.ops.operation import Family
from gradserve_server.parameters.journal import ParametersJournals
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.restoring import restore_parameters
from gradserve_server.parts import make_all_families
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import Expiry, Lifetimes
from gradserve_server.resources.memory import Memory
from gradserve_server.rpc.tensors.messages import InlineLimits, TensorDeliverer
from gradserve_server.runtime import event_loop as event_loop_module
from gradserve_server.runtime.event_loop import ServiceClock
from gradserve_server.security.identity import ShareRules
from gradserve_server.storage import database as database_module
from gradserve_server.storage import journal as journal_module
from gradserve_server.storage import segments as segments_module
from gradserve_server.storage import store as store_module
from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.segments import Segments
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import TensorOpener
from tests.accumulators.bench import Bench
from tests.layers.bench import LayerBench
from tests.simulation.clock import LONGEST_TICK
from tests.simulation.disk import SEGMENT_BYTES, SimulatedDisk
from tests.simulation.leases.watched_store import WatchedStore
from tests.simulation.store import SimulatedStore

ID_WINDOW = 5
REMEMBERED_FORWARDS = 6
MOST_EVENTS = 12
"""Events after which a journal is shortened: few, so that it happens."""
CLIENT_LEASE = 4.0
EXPIRY_INTERVAL = 0.25


class Server:
    """A server from its start to its crash.

    Attributes:
        disk: What it writes on.
        store: Its state.
        memory: The budget of bytes.
        handles: The budget of handles.
        lifetimes: What ends accumulators, parameters and layers.
        accumulators: Its accumulators.
        parameters: Its parameters.
        layers: Its layers.
        tensors: Its stored tensors.
        opener: Opens them.
        deliverer: Delivers results to the store.
        failure: Why it has to stop; None while it can go on.
    """

    def __init__(
        self, path: Path, chance: random.Random, monotonic: Callable[[], float], patched: contextlib.ExitStack
    ) -> None:
        self.disk = SimulatedDisk(path, chance)
        self.failure: str | None = None
        _replace(patched, segments_module, "os", self.disk)
        _replace(patched, database_module, "os", self.disk)
        _replace(patched, store_module, "Segments", lambda folder: Segments(folder, SEGMENT_BYTES))
        _replace(patched, journal_module, "MOST_EVENTS", MOST_EVENTS)
        _replace(patched, event_loop_module, "SLICE_ITEMS", 1)
        self.store = SimulatedStore(StateDirectory(path), self.disk, chance)
        self.journals = AccumulatorJournals(self.store, Durability.ROUND)
        self.parameters_journals = ParametersJournals(self.store, Durability.ROUND)
        self._layer_journals = LayerJournals(self.store, Durability.ROUND)

        def new_id() -> str:
            return f"{chance.getrandbits(64):x}"

        clock = ServiceClock(monotonic, LONGEST_TICK)
        self.lifetimes = Lifetimes(clock, CLIENT_LEASE)
        self.memory = Budget(1 << 40, "bytes of tensor memory", ShareRules())
        self.handles = Budget(1 << 20, "tensor handles", ShareRules())
        self._bench = Bench(
            journals=self.journals,
            memory=self.memory,
            clock=clock,
            lifetimes=self.lifetimes,
            id_window=ID_WINDOW,
            undelivered_lease_seconds=1e6,
        )
        self.accumulators = self._bench.registry
        self.accumulators._new_incarnation = new_id
        self.parameters = ParametersRegistry(
            self.accumulators.factory,
            self.lifetimes,
            Stepper(ForkJoin(1)),
            new_incarnation=new_id,
            journals=self.parameters_journals,
            wall_clock=lambda: int(monotonic() * 1e9),
        )
        device, families = _device()
        self._layer_bench = LayerBench(
            device=device,
            families=families,
            journals=self._layer_journals,
            memory=self.memory,
            handles=self.handles,
            clock=clock,
            lifetimes=self.lifetimes,
            remembered=REMEMBERED_FORWARDS,
        )
        self.layers = self._layer_bench.registry
        self._layer_bench.environment.new_id = new_id
        self.tensors = WatchedStore(
            pool=BufferPool(0),
            memory=Memory(self.memory),
            handles=self.handles,
            leases=LeaseConfig(),
            clock=clock,
            new_handle=new_id,
        )
        self._residence = Residence(device, device, InlineCompute())
        self.opener = TensorOpener(self.tensors, self._residence, InlineCompute())
        self.deliverer = TensorDeliverer(
            self.tensors, self._residence, InlineCompute(), Memory(self.memory), InlineLimits(1 << 20, 1 << 30)
        )
        self._expiry = Expiry(
            clock,
            {
                "averages": self.accumulators.factory.expire,
                "accumulators, parameters and layers": self.lifetimes.expire,
                "tensors": self.tensors.expire,
            },
            {"forwards": self.layers.expire},
            EXPIRY_INTERVAL,
        )

    @property
    def bookkeeping(self) -> int:
        """The bytes of bookkeeping in use."""
        return self._bench.bookkeeping.used + self._layer_bench.bookkeeping.used

    async def restore(self) -> None:
        """Makes again what is on disk, as a server does at its start."""
        await restore_accumulators(self.journals, self.accumulators, np.empty)
        await restore_parameters(self.parameters_journals, self.parameters, np.empty)
        environment, to_host = self._layer_bench.environment, self._residence.copy_to_host
        restore_layers(self._layer_journals, self.layers, environment, np.empty, to_host)

    def start(self) -> "asyncio.Task[None]":
        """Begins to write, and to end what expires; returns the task that does the latter."""
        self.store.start(self._fail)
        return asyncio.get_running_loop().create_task(self._expiry.run())

    def _fail(self, reason: str) -> None:
        self.failure = reason


@cache
def _device() -> tuple[CpuDevice, dict[str, Family]]:
    """Returns a device that all servers share, and what computes on it."""
    device = CpuDevice(BufferPool(0))
    return device, dict(make_all_families(device, ForkJoin(1)))


def _replace(patched: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    patched.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
