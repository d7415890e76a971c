"""A server made with other parts than the usual ones."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve_protocol.address import Address
from gradserve_protocol.v1.server_messages_pb2 import GetServerInfoRequest
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.devices.inventory import DeviceDescription, Inventory
from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle, Service
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_testing import LocalServer
from tests.servers.clocks import SkippingClock
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP


class NoMore:
    """Refuses calls of a method."""

    def __init__(self, method: str) -> None:
        self._method = method

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        def refuse(request: Any, call: Call) -> Any:
            raise ResourceExhaustedError(f"no more {call.method}", field="some")

        return refuse if method.name == self._method else handle


def test_devices_and_ids() -> None:
    inventory = Inventory((DeviceDescription("cpu", "a processor", 1 << 30),), "it has none")
    numbers = itertools.count()
    parts = Parts(inventory=inventory, new_id=lambda: f"number {next(numbers)}")
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        info = client.server_info()
        assert [device.description for device in info.devices] == ["a processor"]
        assert info.why_no_gpu == "it has none"
        assert client.put(np.ones(2)).handle.startswith("number ")


def test_leases_run_out_on_its_clock() -> None:
    clock = SkippingClock()
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), Parts(clock=clock)) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        client.put(np.ones(2), lease=1000)
        clock.skipped = 990
        assert client.server_info().usage["num_handles"] == 1
        clock.skipped = 1010
        eventually(lambda: client.server_info().usage["num_handles"] == 0)


class InMemoryListener:
    """Listens to nobody but the test, which calls it."""

    def __init__(
        self, services: Sequence[Service], admission: Admission, limits: LimitsConfig, certificates: object, way: object
    ) -> None:
        self.notes: list[str] = []
        self._services = {service.descriptor.name: service for service in services}
        self._admission = admission

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        self.notes.append("bind")
        return list(addresses)

    async def serve(self) -> None:
        self.notes.append("serve")

    async def drain(self, grace: float) -> None:
        self.notes.append(f"drain for {grace:g} s, {'open' if self._admission.is_open else 'closed'}")

    async def call(self, service: str, method: str, request: Any) -> Any:
        served = self._services[service]
        descriptor = served.descriptor.methods_by_name[method]
        return await served.handle(descriptor)(request, Call(descriptor.full_name))


async def test_another_listener_has_three_verbs_and_calls_the_same_methods() -> None:
    made: list[InMemoryListener] = []

    def make(*arguments: Any) -> InMemoryListener:
        made.append(InMemoryListener(*arguments))
        return made[-1]

    config = ServerConfig(runtime=RuntimeConfig(device="cpu", warm_up=False, drain_seconds=7))
    async with Server(config, Parts(make_listener=make)):
        (listener,) = made
        info = await listener.call("ServerService", "GetServerInfo", GetServerInfoRequest())
        assert info.version == gradserve.__version__
        assert listener.notes == ["bind", "serve"]
    assert listener.notes == ["bind", "serve", "drain for 7 s, closed"]
    with pytest.raises(UnavailableError):
        await listener.call("ServerService", "GetServerInfo", GetServerInfoRequest())


def test_an_interceptor_is_around_every_call() -> None:
    parts = Parts(interceptors=(NoMore("ListTensors"),))
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        assert client.server_info().usage["num_handles"] == 0
        with pytest.raises(gradserve.ResourceExhaustedError, match=r"no more gradserve\.v1\..*\.ListTensors"):
            client.list_tensors()


class TooLate:
    """Refuses calls of a method that have been carried out."""

    def __init__(self, method: str) -> None:
        self._method = method

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that refuses answers of the method."""
        if method.name != self._method:
            return handle

        async def refuse(request: Any, call: Call) -> Any:
            await handle(request, call)
            raise ResourceExhaustedError(f"too late for {method.full_name}")

        return refuse


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_an_interceptor_that_refuses_an_answer_leaves_nothing_that_it_names(way: Any) -> None:
    parts = Parts(interceptors=(TooLate("FusedBatchNorm"),))
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=way) as client,
    ):
        x, ones, none = np.ones((1, 128, 128, 4), np.float32), np.ones(4, np.float32), np.empty(0, np.float32)
        with pytest.raises(gradserve.ResourceExhaustedError, match="too late"):
            client.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=none, variance=none, keep=True)
        assert client.server_info().usage["num_handles"] == 0
