"""Which device ops run on."""

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.inventory import NO_CUPY, DeviceDescription, Inventory, NoSuchDeviceError, choose_device
from tests.servers.command_line import run_cli

HOST = CpuDevice(BufferPool(0))
INVENTORY = Inventory((DeviceDescription("cpu", "a processor", 1 << 30),), "the driver is too old")


def test_the_host_has_no_memory_apart() -> None:
    HOST.limit_memory(1)
    assert HOST.empty((1000,), np.dtype(np.uint8)).nbytes == 1000
    HOST.free_cached()
    HOST.trim()
    assert not HOST.is_full(MemoryError()), "there is nothing that it could give back"
    device: Device = HOST
    assert device.memory_bytes is None
    assert device.usage() is None


@pytest.mark.parametrize("wanted", ["cpu", "auto"])
def test_the_host(wanted: str) -> None:
    assert choose_device(wanted, HOST, INVENTORY) is HOST


@pytest.mark.parametrize(
    ("wanted", "why_no_gpu", "messages"),
    [
        ("auto", "the driver is too old", ["ops run on the CPU: the driver is too old"]),
        ("auto", NO_CUPY, []),
        ("cpu", "the driver is too old", []),
    ],
)
def test_the_log_says_why_ops_do_not_run_on_a_gpu(
    wanted: str, why_no_gpu: str, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    choose_device(wanted, HOST, Inventory(INVENTORY.devices, why_no_gpu))
    assert caplog.messages == messages


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there(wanted: str) -> None:
    with pytest.raises(
        NoSuchDeviceError, match=r"expected a device of this machine, cpu or auto, got 'cuda:[07]'; the driver"
    ):
        choose_device(wanted, HOST, INVENTORY)


def test_a_server_says_what_it_lacks() -> None:
    done = run_cli("serve", "--listen", "127.0.0.1:0", "--device", "cuda:99")
    assert done.returncode == 1
    assert "Error: --device: expected a device of this machine, cpu" in done.stderr


def test_a_server_does_not_start_without_the_device_of_its_accumulators() -> None:
    done = run_cli("serve", "--listen", "127.0.0.1:0", "--device", "cpu", "--accumulator-device", "cuda:0")
    assert done.returncode == 1
    assert "Error: --accumulator-device: expected a device of this server, cpu, got 'cuda:0'" in done.stderr


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_names_that_no_device_has(wanted: str) -> None:
    done = run_cli("serve", "--device", wanted)
    assert done.returncode == 2
    assert done.stderr == f"Error: --device: expected cpu, cuda, cuda:N or auto, got {wanted!r}\n"
