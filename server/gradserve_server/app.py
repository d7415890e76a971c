"""The server put together: the one place that knows all parts."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
import uuid
from functools import partial
from pathlib import Path

import gradserve
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.config import ServerConfig
from gradserve_server.devices.compute import ThreadCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.inventory import list_devices
from gradserve_server.devices.parallel import ForkJoin
from gradserve_server.devices.pool import BufferPool
from gradserve_server.devices.selection import choose_device
from gradserve_server.layers.families import make_layer_families
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.ops.registry import make_families
from gradserve_server.ops.runner import OpRunner
from gradserve_server.rpc.accumulator_service import AccumulatorServicer
from gradserve_server.rpc.batch_norm_layer_service import BatchNormLayerServicer
from gradserve_server.rpc.gradient_ops_service import GradientOpsServicer
from gradserve_server.rpc.server import GrpcServer
from gradserve_server.rpc.server_service import ServerServicer, Usage
from gradserve_server.rpc.tensor_service import TensorServicer
from gradserve_server.rpc.tensors import Placer
from gradserve_server.tensors.quotas import Quota
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.store import TensorStore

_log = logging.getLogger(__name__)

_EXPIRY_INTERVAL_SECONDS = 1.0


class Server:
    """A gradserve server. Made and used on one event loop.

    async with Server(config) as server:
        print(server.addresses)
        await server.run_until_signal()
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        limits = config.limits
        pool = BufferPool(config.runtime.pool_bytes)
        memory = Quota(limits.max_bytes, "bytes of tensor memory")
        handles = Quota(limits.max_handles, "tensor handles")
        host = CpuDevice(pool)
        device = choose_device(config.runtime.device, host)
        self._compute = ThreadCompute(config.runtime.compute_threads)
        self._parallel = ForkJoin(config.runtime.compute_threads)
        ops = make_families(device, self._parallel)
        self.runner = OpRunner(
            device=device,
            families={**ops, **make_layer_families(device, ops)},
            compute=self._compute,
            memory=memory,
        )
        self.store = TensorStore(
            pool=pool,
            memory=memory,
            handles=handles,
            leases=config.leases,
            clock=time.monotonic,
            new_handle=_new_id,
        )
        self.registry = AccumulatorRegistry(
            compute=self._compute,
            allocate=pool.empty,
            memory=memory,
            limits=limits,
            clock=time.monotonic,
            new_incarnation=_new_id,
        )
        self.layers = LayerRegistry(
            runner=self.runner,
            compute=self._compute,
            memory=memory,
            handles=handles,
            limits=limits,
            clock=time.monotonic,
            new_id=_new_id,
            new_seed=partial(secrets.randbits, 63),
        )
        residence = Residence(self.store, host, device, self._compute)
        placer = Placer(self.store, limits.inline_limit_bytes, limits.max_message_bytes)
        started = time.monotonic()
        self._grpc = GrpcServer(
            tensors=TensorServicer(self.store, residence, config.runtime.stream_idle_seconds),
            accumulators=AccumulatorServicer(self.registry, self.store, residence, placer),
            gradient_ops=GradientOpsServicer(self.runner, self.store, placer),
            batch_norm_layers=BatchNormLayerServicer(self.layers, self.store, residence, placer),
            server=ServerServicer(
                version=gradserve.__version__,
                devices=list_devices(),
                device=device.name,
                ops_prepared=lambda: self.runner.is_prepared,
                limits=limits,
                leases=config.leases,
                usage=Usage(memory, handles, self.registry.count, self.registry.waiters, self.layers.count),
                uptime=lambda: time.monotonic() - started,
            ),
            limits=limits,
        )
        self._expiry: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()
        """Where the server listens, once started."""

    async def __aenter__(self) -> "Server":
        try:
            await self.start()
        except BaseException:
            await self.drain()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.drain()

    async def start(self) -> None:
        """Binds, serves, and writes the address file.

        Raises:
            OSError: An address cannot be bound, or the file not be written.
        """
        self.addresses = tuple(self._grpc.bind(self._config.listen.listen))
        await self._grpc.start()
        self._expiry = asyncio.create_task(self._expire_leases())
        if self._config.runtime.warm_up:
            self.runner.prepare()
        if self._config.listen.address_file is not None:
            _write_addresses(Path(self._config.listen.address_file), self.addresses)
        _log.info("serving on %s", ", ".join(self.addresses))

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            await stop.wait()
        finally:
            # A second signal ends a drain that takes too long for somebody.
            for number in signals:
                loop.remove_signal_handler(number)

    async def drain(self) -> None:
        """Shuts down: refuses new calls, ends waits with UNAVAILABLE, lets streams finish within the drain time."""
        _log.info("draining")
        self._grpc.refuse_new_calls()
        self.registry.close()
        await self._grpc.stop(self._config.runtime.drain_seconds)
        if self._expiry is not None:
            self._expiry.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._expiry
        await self.runner.close()
        self._compute.close()
        self._parallel.close()
        _log.info("stopped")

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_SECONDS)
            self.registry.expire()
            for what, count in (("tensors", self.store.expire()), ("forwards", self.layers.expire())):
                if count:
                    _log.info("%d %s expired", count, what)


def _new_id() -> str:
    return uuid.uuid4().hex


def _write_addresses(path: Path, addresses: tuple[str, ...]) -> None:
    """Writes the file in one step: whoever waits for it never reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(f"{address}\n" for address in addresses))
    temporary.replace(path)
