"""Memory and events of one process in another one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn, installed
from tests.servers.processes import end_process, ended


@dataclass
class Exporter:
    """The other process; see `exporter`."""

    process: "subprocess.Popen[str]"
    pool: bytes
    own: bytes
    event: bytes

    def do(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline().strip() == word


@contextmanager
def exporting(settings: Settings) -> Iterator[Exporter]:
    command = [sys.executable, "-m", "tests.devices.cuda.stand_in.exporter"]
    variables = os.environ | settings.but(report=None).variables()
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with ended(process):
        assert process.stdout is not None
        yield Exporter(process, *map(bytes.fromhex, process.stdout.readline().split()))


@pytest.fixture
def exporter(gpu_settings: Settings) -> Iterator[Exporter]:
    with exporting(gpu_settings) as made:
        yield made


@pytest.fixture
def stream(stand_in: StandIn) -> Any:
    stand_in.cupy.cuda.runtime.setDevice(0)
    with stand_in.cupy.cuda.Stream(non_blocking=True) as made:
        yield made


def opened(cupy: Any, handle: bytes) -> tuple[Any, int]:
    """Returns an array in the memory of the other process, and the address of that memory."""
    address = cupy.cuda.runtime.ipcOpenMemHandle(handle)
    memory = cupy.cuda.UnownedMemory(address, 4000, None)
    return cupy.ndarray((1000,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0)), address


def test_an_event_orders_the_work_of_two_processes(exporter: Exporter, stand_in: StandIn, stream: Any) -> None:
    cupy = stand_in.cupy
    array, address = opened(cupy, exporter.pool)
    event = cupy.cuda.runtime.ipcOpenEventHandle(exporter.event)
    exporter.do("fill")
    cupy.cuda.runtime.streamWaitEvent(stream.ptr, event)
    np.testing.assert_array_equal(array.get(), np.full(1000, 7, np.float32))
    cupy.cuda.runtime.eventSynchronize(event)
    assert cupy.cuda.runtime.eventQuery(event) == 0
    cupy.cuda.runtime.ipcCloseMemHandle(address)


def test_memory_is_open_until_it_was_closed_as_often(exporter: Exporter, stand_in: StandIn, stream: Any) -> None:
    runtime = stand_in.cupy.cuda.runtime
    array, address = opened(stand_in.cupy, exporter.pool)
    assert runtime.ipcOpenMemHandle(exporter.pool) == address
    runtime.ipcCloseMemHandle(address)
    np.testing.assert_array_equal(array.get(), np.zeros(1000, np.float32))
    runtime.ipcCloseMemHandle(address)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.ipcCloseMemHandle(address)


def test_closing_memory_that_queued_work_uses_is_a_fault(exporter: Exporter, stand_in: StandIn, stream: Any) -> None:
    array, address = opened(stand_in.cupy, exporter.pool)
    _ = array + 1
    with pytest.raises(RuntimeError):
        stand_in.cupy.cuda.runtime.ipcCloseMemHandle(address)
    stand_in.faults.expected("closed while add may still use it")


def test_a_process_does_not_open_what_it_shares(stand_in: StandIn, stream: Any) -> None:
    cupy = stand_in.cupy
    runtime = cupy.cuda.runtime
    array, event = cupy.zeros(10), cupy.cuda.Event(disable_timing=True, interprocess=True)
    with pytest.raises(runtime.CUDARuntimeError, match="invalid device context"):
        runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(array.data.ptr))
    with pytest.raises(runtime.CUDARuntimeError, match="invalid device context"):
        runtime.ipcOpenEventHandle(runtime.ipcGetEventHandle(event.ptr))
    with pytest.raises(runtime.CUDARuntimeError, match="invalid resource handle"):
        runtime.ipcGetEventHandle(cupy.cuda.Event(disable_timing=True).ptr)


@pytest.mark.parametrize("dead_exporters", ["stay", "fault"])
def test_what_a_process_leaves_when_it_is_killed(gpu_settings: Settings, dead_exporters: str) -> None:
    settings = gpu_settings.but(dead_exporters=dead_exporters)
    with exporting(settings) as exporter, installed(settings) as stand_in:
        cupy = stand_in.cupy
        cupy.cuda.runtime.setDevice(0)
        array, _ = opened(cupy, exporter.pool)
        end_process(exporter.process)
        if dead_exporters == "stay":
            np.testing.assert_array_equal(array.get(), np.zeros(1000, np.float32))
        else:
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
                array.get()
            stand_in.faults.expected("that process has ended")
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            cupy.cuda.runtime.ipcOpenMemHandle(exporter.own)


def test_memory_that_its_process_frees_is_not_used_any_more(exporter: Exporter, stand_in: StandIn, stream: Any) -> None:
    runtime = stand_in.cupy.cuda.runtime
    array, _ = opened(stand_in.cupy, exporter.own)
    exporter.do("free")
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        array.get()
    stand_in.faults.expected("it was freed there")
