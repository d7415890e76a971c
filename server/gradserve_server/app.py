"""The assembled server: the one module that knows all parts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import gradserve
from gradserve_protocol.address import Address
from gradserve_protocol.lasting import lasting_task
from gradserve_server.accumulators.durable.restoring import restore_accumulators
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.places.device_place import ConvertingReducer, DevicePlace
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.round_hold import InRounds, RoundHold
from gradserve_server.config import ServerConfig
from gradserve_server.devices.compute import InThreads
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.devices.host.shared_blocks import Readers, SharedAverages, SharedMemory
from gradserve_server.devices.inventory import Processors
from gradserve_server.errors import UnavailableError
from gradserve_server.layers.batch_norm.layer import LayerEnvironment
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.layers.batch_norm.restoring import restore_layers
from gradserve_server.observe.logs import LogMemory
from gradserve_server.observe.observed import Observed, Summary, wanted_tracer
from gradserve_server.observe.port import HttpContext, ObservationPort
from gradserve_server.observe.status.snapshot import layer_snapshots
from gradserve_server.observe.status.source import ServerFacts, StatusSource, disk_of
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import OPS
from gradserve_server.ops.runner import OpRunner
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.restoring import restore_parameters
from gradserve_server.parts import Parts, ResourceCounts, backups_of, open_state, within_descriptors
from gradserve_server.resources.cluster import member_of
from gradserve_server.resources.lifetimes import Expiry, Lifetimes
from gradserve_server.resources.memory import Budgets, Memory
from gradserve_server.resources.registry import ResourceKey, ServerRun
from gradserve_server.resources.runs import Runs
from gradserve_server.rpc.accumulators.service import AccumulatorServicer
from gradserve_server.rpc.batch_norm_layers.service import BatchNormLayerServicer
from gradserve_server.rpc.boundary.interceptors import AccessChecks, FairCalls
from gradserve_server.rpc.gradient_ops.service import GradientOpsServicer
from gradserve_server.rpc.leases.service import LeaseServicer
from gradserve_server.rpc.listeners.sockets.context import FairSockets, GpuAccess, SocketContext, methods_of
from gradserve_server.rpc.listeners.sockets.listener import SocketListener, bind_sockets
from gradserve_server.rpc.listeners.sockets.payloads import max_regions
from gradserve_server.rpc.parameters.service import ParameterServicer
from gradserve_server.rpc.server_info.service import DeviceFigures, ServerServicer, Usage
from gradserve_server.rpc.services import Services
from gradserve_server.rpc.sockets.service import SocketAddresses, SocketServicer, TicketRegistry
from gradserve_server.rpc.tensors.messages import InlineLimits, TensorDeliverer
from gradserve_server.rpc.tensors.service import TensorServicer
from gradserve_server.runtime.event_loop import LoopWatch
from gradserve_server.runtime.files import OwnedFile, write_addresses
from gradserve_server.security.access import Access, UserKeys, share_rules
from gradserve_server.security.identity import ANONYMOUS, Credentials, Identity
from gradserve_server.security.tls import context_of, explicit_bulk_address, server_certificates, unprotected
from gradserve_server.tensors.eviction import Evictor
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import TensorOpener
from gradserve_server.tensors.payload import InFlight
from gradserve_server.tensors.spec import FLOAT32
from gradserve_server.tensors.store import TensorStore
from gradserve_server.tensors.transfers import Downloads, Uploads
from gradserve_server.upstream.batches import Counts

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.aggregator import Aggregator
    from gradserve_server.rpc.upstream.parameters import AggregatingParameters
    from gradserve_server.rpc.upstream.service import AggregatingServicer

_log = logging.getLogger(__name__)


class Server:
    """A gradserve server. Made and used on one event loop.

    async with Server(config) as server:
        print(server.addresses)
        await stop.wait()
    """

    def __init__(
        self, config: ServerConfig, parts: Parts | None = None, on_failure: Callable[[str], object] = _log.critical
    ) -> None:
        """Opens the state directory, if there is one.

        Args:
            config: The configuration.
            parts: Parts that replace the default ones.
            on_failure: Called when the server must stop, because it cannot go on; takes the reason.

        Raises:
            StateError: The state directory cannot be used.
            OSError: It cannot be made or opened.
        """
        self._parts = parts = parts or Parts()
        self._config = config
        self._on_failure = on_failure
        self._run = ServerRun(parts.new_id)
        self._member = member_of(config.cluster)
        self.access = None
        if config.security.access is not None:
            self.access = Access(Path(config.security.access), UserKeys(parts.clock))
        listen = config.listen.listen
        self._limits = limits = within_descriptors(
            config.limits, len(listen) + sum(["localhost" in each for each in listen])
        )
        self.observed = Observed(
            tracer=wanted_tracer(parts.tracer_provider, gradserve.__version__, is_wanted=config.runtime.tracing)
        )
        self._processors = processors = Processors.of(
            config.runtime,
            lambda host: parts.choose_device(config.runtime.device, host, parts.inventory),
            parts.share_gpu if config.listen.gpu_sharing != "off" else lambda _device: None,
            on_failure,
        )
        device = processors.device
        self.budgets = budgets = Budgets(limits, share_rules(limits.reserved_share, self.access), device.memory_bytes)
        self._memory = memory = Memory(budgets.memory, budgets.device_memory, device.holds)
        if budgets.device_memory is not None:
            device.limit_memory(budgets.device_memory.limit)
        self.lifetimes = Lifetimes(parts.clock, config.leases.client_lease_seconds)
        self.store = TensorStore(
            pool=processors.pool,
            memory=memory,
            handles=budgets.handles,
            leases=config.leases,
            clock=parts.clock,
            new_handle=self._run.new_id,
            is_of_another_run=self._run.is_of_another,
        )
        self._residence = residence = Residence(processors.host, device, processors.compute, processors.op_compute)
        self.evictor = None if memory.device is None else Evictor(self.store, memory, residence)
        self._opener = TensorOpener(self.store, residence, processors.compute)
        longest = InlineLimits(limits.inline_limit_bytes, limits.max_message_bytes)
        self._deliverer = TensorDeliverer(self.store, residence, processors.compute, memory, longest)
        self._in_flight = InFlight(limits.max_inflight_bytes, limits.min_arrival_rate)

        self._reducer = reducer = Reducer(processors.parallel)
        device_reducer = parts.make_device_reducer(device)
        self._places = self._make_places(reducer, device_reducer)
        self._receiver = GradientReceiver(self._opener, processors.compute, reducer)
        self._stepper = Stepper(processors.parallel)
        prepared: dict[str, Family] = {"sums": reducer, "steps of optimizers": self._stepper}
        if device_reducer is not None and config.runtime.accumulator_device == device.name:
            prepared["sums on the device"] = device_reducer
        self.runner = OpRunner(
            device=device,
            families=parts.make_families(device, processors.parallel),
            compute=processors.op_compute,
            memory=memory,
            loader=processors.loader,
            evictor=self.evictor,
            beside=prepared,
        )

        self._state = open_state(config.state)
        self._backups = backups_of(config.state, parts.wall_clock)
        self._shared_memory, self._readers = SharedMemory(limits.max_region_bytes), Readers()
        self._runs = Runs(parts.wall_clock, None if self._state is None else self._state.store)
        self.registry = self._make_registry()
        self.parameters = self._make_parameters(self.registry.factory)
        self._layer_environment = LayerEnvironment(
            runner=self.runner,
            compute=processors.compute,
            memory=memory,
            handles=budgets.handles,
            clock=parts.clock,
            new_id=self._run.new_id,
            new_seed=parts.new_seed,
            journals=None if self._state is None else self._state.layers,
        )
        self.layers = LayerRegistry(
            self._layer_environment, budgets.layers, self.lifetimes, budgets.bookkeeping, self._run.is_of_another
        )
        self._leases = self._make_expiry()

        self._tickets, self.socket_addresses = TicketRegistry(parts.clock), SocketAddresses()
        self._fair_sockets = FairSockets(
            limits.max_connections,
            limits.max_region_bytes,
            limits.max_gpu_region_bytes,
            max_regions(),
            budgets.rules,
        )
        resources = ResourceCounts(
            budgets, self.registry, self.parameters, self._fair_sockets, self.lifetimes.clients, processors.pool
        )
        self.usage = Usage(
            memory=budgets.memory,
            handles=budgets.handles,
            accumulators=self.registry.factory.count,
            waiters=self.registry.factory.waiters,
            layers=budgets.layers,
            bookkeeping=budgets.bookkeeping,
            device_memory=budgets.device_memory,
            num_parameters=lambda: len(self.parameters),
        )
        self.counts = Counts()
        """The counts of an aggregator."""
        self.status = self._make_status(resources)
        self.summary = Summary(self.observed, resources.memory)
        self.aggregator: Aggregator | None = None
        """The services that forward to the server upstream; None without one."""
        self._logs = LogMemory()
        self.services = self._make_services()
        self._certificates = server_certificates(config.tls)
        self.listener = parts.make_listener(
            self.services.all, self.services.admission, limits, self._certificates, self.observed.traffic.grpc
        )
        self.sockets = self._make_sockets()
        self.observation = ObservationPort(
            config.listen.http_listen,
            HttpContext(
                status=self.status,
                identify=self._identify,
                asks_for_token=self.access is not None,
                hosts=config.listen.http_host,
                tls=None if self._certificates is None else context_of(self._certificates),
                logs=self._logs,
            ),
        )

        self._watch = None
        if config.runtime.event_loop_warning_seconds is not None:
            self._watch = LoopWatch(config.runtime.event_loop_warning_seconds)
        self._lasting: list[asyncio.Task[None]] = []
        """Background tasks that run as long as the server."""
        self._trimming: asyncio.Task[None] | None = None
        self._address_file: OwnedFile | None = None
        self.round_hold: RoundHold | None = None
        """Holds rounds, if a file was named that says which are open."""
        if config.listen.rounds_file is not None:
            self.round_hold = RoundHold(self.registry.factory.gate, self._in_rounds, Path(config.listen.rounds_file))
        self.addresses: tuple[str, ...] = ()
        """The addresses on which the server listens, once it has started."""

    def _make_places(self, reducer: Reducer, device_reducer: ConvertingReducer | None) -> Places:
        processors = self._processors
        host = HostPlace(processors.host.name, reducer, processors.pool.empty, processors.compute, self.budgets.memory)
        device = None
        if device_reducer is not None and self.evictor is not None:
            on_device, compute = processors.device, InThreads(processors.op_compute)
            device = DevicePlace(on_device.name, device_reducer, on_device.empty, compute, on_device, self.evictor)
        return Places(host, device, self._config.runtime.accumulator_device)

    def _make_registry(self) -> AccumulatorRegistry:
        factory = AccumulatorFactory(
            places=self._places,
            bookkeeping=self.budgets.bookkeeping,
            limits=self._limits,
            lifetimes=self.lifetimes,
            make_average_memory=partial(SharedAverages, self._shared_memory, self._readers),
            observe=self.observed.observe,
            member=self._member,
        )
        return AccumulatorRegistry(
            factory,
            self.lifetimes,
            new_incarnation=self._run.new_id,
            wall_clock=self._parts.wall_clock,
            is_of_another_run=self._run.is_of_another,
            member=self._member,
            runs=self._runs,
            journals=None if self._state is None else self._state.accumulators,
        )

    def _make_parameters(self, factory: AccumulatorFactory) -> ParametersRegistry:
        return ParametersRegistry(
            factory,
            self.lifetimes,
            self._stepper,
            new_incarnation=self._run.new_id,
            wall_clock=self._parts.wall_clock,
            is_of_another_run=self._run.is_of_another,
            member=self._member,
            runs=self._runs,
            ordered=self.registry.ordered,
            observe=self.observed.observe_parameters,
            journals=None if self._state is None else self._state.parameters,
        )

    def _in_rounds(self) -> Iterable[tuple[ResourceKey, InRounds]]:
        return chain(self.registry.all(), self.parameters.all())

    def _make_expiry(self) -> Expiry:
        beside = {"forwards": self.layers.expire}
        if self._processors.device is not self._processors.host:
            beside["arrays"] = self._trim
        return Expiry(
            self._parts.clock,
            {
                "averages that nobody asked for again": self.registry.factory.expire,
                "accumulators, layers and parameters": self.lifetimes.expire,
                "tensors": self.store.expire,
            },
            beside,
        )

    def _make_status(self, resources: ResourceCounts) -> StatusSource:
        started = time.monotonic()
        facts = ServerFacts(
            version=gradserve.__version__,
            incarnation=self._run.incarnation,
            device=self._processors.device.name,
            ops_prepared=lambda: not self.runner.is_preparing,
            memory=resources.memory,
            resources=resources.counts,
            layers=partial(layer_snapshots, self.layers),
            upstream=self._config.upstream.upstream or "",
            passed_on=lambda: vars(self.counts),
            member=self._member,
            uptime=lambda: time.monotonic() - started,
            http_url=lambda: self.observation.url,
            backups=lambda: None if self._backups is None else self._backups.figures,
            disk=lambda: None if self._state is None else disk_of(self._state.store.path),
        )
        return StatusSource(facts, self.registry, self.parameters, self.observed, self._runs)

    def _make_services(self) -> Services:
        config, limits, processors, budgets = self._config, self._limits, self._processors, self.budgets
        opener, deliverer = self._opener, self._deliverer
        host, device, empty = processors.host, processors.device, processors.pool.empty
        figures = DeviceFigures(
            device, self.evictor, inventory=self._parts.inventory, ops_prepared=lambda: self.runner.is_prepared
        )
        accumulators, parameters, leases = self._make_servicers()
        access = None
        if self.access is not None:
            access = AccessChecks(self.access, FairCalls(limits.max_calls, budgets.rules))
        servicers: dict[str, object] = {
            "TensorService": TensorServicer(
                self.store,
                self._residence,
                Downloads(host, device, processors.op_compute, empty, budgets.memory),
                Uploads(host, device, processors.compute, processors.op_compute, empty, self._memory, self.evictor),
                opener,
                self._in_flight,
                processors.compute,
                stream_idle_seconds=config.runtime.stream_idle_seconds,
                max_message_bytes=limits.max_message_bytes,
                keeps_gradients=self.aggregator is not None,
            ),
            "AccumulatorService": accumulators,
            "ParameterService": parameters,
            "GradientOpsService": GradientOpsServicer(OPS, self.runner, opener, deliverer, processors.compute),
            "BatchNormLayerService": BatchNormLayerServicer(self.layers, opener, deliverer, self.store.lease_seconds),
            "LeaseService": leases,
            "SocketService": SocketServicer(self._tickets, self.socket_addresses),
            "ServerService": ServerServicer(
                self.status,
                figures,
                self.usage,
                limits,
                config.leases,
                self.socket_addresses,
                processors.compute,
                None if self._state is None else self._state.store.path,
                self._logs,
            ),
        }
        return Services(
            servicers,
            access,
            self._parts.interceptors,
            processors.watch.suspect,
            self.observed,
            keeps_gradients=self.aggregator is not None,
        )

    def _make_servicers(
        self,
    ) -> "tuple[AccumulatorServicer | AggregatingServicer, ParameterServicer | AggregatingParameters, LeaseServicer]":
        """Returns the servicers of accumulators, of parameters, and of leases."""
        compute, incarnation = self._processors.compute, self._run.incarnation
        accumulators = AccumulatorServicer(
            self.registry, self._receiver, self._deliverer, compute, incarnation, self._member
        )
        parameters = ParameterServicer(
            self.parameters, self._opener, self._receiver, self._deliverer, compute, incarnation, self._member
        )
        if self._config.upstream.upstream is None:
            return accumulators, parameters, LeaseServicer(self.lifetimes.clients)
        from gradserve_server.rpc.upstream.aggregator import Aggregator  # with a client in it, which takes 0.1 s

        self.aggregator = Aggregator(
            self._config.upstream,
            place=self._places.host,
            memory=self.budgets.memory,
            incarnation=incarnation,
            counts=self.counts,
            receiver=self._receiver,
            opener=self._opener,
            deliverer=self._deliverer,
            accumulators=(accumulators, self.registry),
            parameters=(parameters, self.parameters),
            clients=self.lifetimes.clients,
        )
        return self.aggregator.accumulators, self.aggregator.parameters, self.aggregator.leases

    def _make_sockets(self) -> SocketListener:
        config, limits, processors = self._config, self._limits, self._processors
        context = SocketContext(
            methods=methods_of(self.services.all),
            tickets=self._tickets,
            admission=self.services.admission,
            memory=self.budgets.memory,
            fair=self._fair_sockets,
            in_flight=self._in_flight,
            messages=InFlight(limits.max_queued_bytes, limits.min_arrival_rate),
            allocate=processors.pool.empty,
            compute=processors.compute,
            shared_memory=self._shared_memory,
            readers=self._readers,
            max_message_bytes=limits.max_message_bytes,
            identify=self._identify,
            traffic=self.observed.traffic,
            refuse=self.services.observed.refuse,
            gpu=GpuAccess(processors.sharing, config.listen.gpu_sharing),
            user_key=(lambda _credentials: "") if self.access is None else self.access.user_key,
            on_fault=processors.watch.suspect,
        )
        return SocketListener(
            context, config.runtime.stream_idle_seconds, self._certificates, max_connections=limits.max_connections
        )

    def _identify(self, credentials: Credentials) -> Identity:
        return ANONYMOUS if self.access is None else self.access.identify(credentials)

    async def __aenter__(self) -> "Server":
        try:
            await self.start()
        except BaseException:
            await self._close(0)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.drain()

    async def start(self) -> None:
        """Restores the state, binds the addresses, serves, and writes the address file.

        Raises:
            StateError: The state is damaged.
            ResourceExhaustedError: The limits allow less than what there is in the state.
            OSError: An address cannot be bound, or the file cannot be written.
        """
        self._logs.open()
        state = self._state
        if state is not None:
            allocate, to_host = self._processors.pool.empty, self._residence.copy_to_host
            with self.budgets.rules.suspended():
                count = await restore_accumulators(state.accumulators, self.registry, allocate)
                num_parameters = await restore_parameters(state.parameters, self.parameters, allocate)
                num_layers = restore_layers(state.layers, self.layers, self._layer_environment, allocate, to_host)
            state.store.start(self._on_failure)
            self._runs.end_lost()
            counts = (count, num_parameters, num_layers)
            _log.info("restored %d accumulators, %d parameters and %d layers from %s", *counts, state.store.path)
        if self.aggregator is not None:
            await self.aggregator.open()
            _log.info("forwarding gradients and updates to %s", self.aggregator.address)
        listen = [Address.to_listen(address) for address in self._config.listen.listen]
        bound = self.listener.bind(listen)
        self.addresses = tuple(map(str, bound))
        bind_sockets(self.sockets, self._config.listen, bound, self.socket_addresses)
        self.observation.bind()
        self.sockets.serve()
        await self.listener.serve()
        self.observation.serve()
        self._lasting.append(lasting_task("ending what has expired", self._leases.run, _log))
        self._lasting.append(lasting_task("the line about the last minute", self.summary.run, _log))
        if self._backups is not None:
            self._lasting.append(lasting_task("taking backups", self._backups.run, _log))
        if self._watch is not None:
            self._watch.start()
        if self.access is not None:
            self._lasting.append(lasting_task("following the access file", self.access.follow, _log))
        if self._config.listen.address_file is not None:
            self._address_file = write_addresses(Path(self._config.listen.address_file), self.addresses)
        _log.info("serving on %s", ", ".join(self.addresses))
        listens = [*bound, *explicit_bulk_address(self._config.listen)]
        if self.observation.address is not None:
            _log.info("status page and metrics on %s", self.observation.url)
            listens.append(self.observation.address)
        if warning := unprotected(listens, is_encrypted=self._certificates is not None):
            _log.warning("%s", warning)
        if self._config.runtime.warm_up_ops:
            self.runner.prepare()
        elif self._config.runtime.warm_up:
            self._reducer.want(FLOAT32)
            self.runner.begin()

    async def drain(self) -> None:
        """Shuts down: refuses new calls, ends waits with UNAVAILABLE, and lets streams finish within the drain time.

        A thread that is compiling a kernel finishes it; `join` waits for that.
        """
        _log.info("draining")
        await self._close(self._config.runtime.drain_seconds)
        _log.info("stopped")

    async def _trim(self) -> int:
        """Begins to give back what the device keeps for later, if that is too much; leases do not wait for it."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(self._processors.trim())
        return 0

    def join(self) -> None:
        """Waits until all threads of the server have ended."""
        self.runner.join()

    async def _close(self, grace: float) -> None:
        if self._address_file is not None:
            self._address_file.remove()
        self.services.close()
        if self.aggregator is not None:
            await self.aggregator.close()
        self.registry.close()
        self.parameters.close()
        self.lifetimes.clients.close(UnavailableError("the server is shutting down", code="GS_SHUTTING_DOWN"))
        await asyncio.gather(self.listener.drain(grace), self.sockets.drain(grace))
        await self.observation.close()
        self._logs.close()
        for task in (*self._lasting, self._trimming):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._watch is not None:
            self._watch.stop()
        if self.round_hold is not None:
            self.round_hold.release()  # Not sooner: no round is to begin that nobody ends.
        self.runner.close()
        if self._state is not None:
            self._state.store.close()
        self._processors.close()
