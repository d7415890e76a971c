"""A server made with other parts than the usual ones."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve_server.devices.inventory import DeviceDescription
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.leases.service_clock import ServiceClock
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle
from gradserve_server.testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually


class SkippingClock(ServiceClock):
    """A clock that can be put forward."""

    def __init__(self) -> None:
        super().__init__(time.monotonic, 5.0)
        self.skipped = 0.0

    def __call__(self) -> float:
        return super().__call__() + self.skipped


class NoMore:
    """Refuses calls of a method."""

    def __init__(self, method: str) -> None:
        self._method = method

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        def refuse(request: Any, call: Call) -> Any:
            raise ResourceExhaustedError(f"no more {call.method}", field="some")

        return refuse if method.name == self._method else handle


def test_devices_and_ids() -> None:
    devices = (DeviceDescription("cpu", "a processor", 1 << 30),)
    numbers = itertools.count()
    parts = Parts(devices=devices, new_id=lambda: f"number {next(numbers)}")
    with LocalServer(parts=parts) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        assert [device.description for device in client.server_info().devices] == ["a processor"]
        assert client.put(np.ones(2)).handle.startswith("number ")


def test_leases_run_out_on_its_clock() -> None:
    clock = SkippingClock()
    with (
        LocalServer(parts=Parts(clock=clock)) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        client.put(np.ones(2), lease=1000)
        clock.skipped = 990
        assert client.server_info().usage["num_handles"] == 1
        clock.skipped = 1010
        eventually(lambda: client.server_info().usage["num_handles"] == 0)


def test_an_interceptor_is_around_every_call() -> None:
    parts = Parts(interceptors=(NoMore("ListTensors"),))
    with LocalServer(parts=parts) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        assert client.server_info().usage["num_handles"] == 0
        with pytest.raises(gradserve.ResourceExhaustedError, match=r"no more gradserve\.v1\..*\.ListTensors"):
            client.list_tensors()
