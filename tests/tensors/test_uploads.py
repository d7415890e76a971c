"""Tensors are brought to the memory of a device while they arrive."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.arrays import PayloadError
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.memory import Memory, Room
from gradserve_server.tensors import transfers as uploads
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import Upload, _Places
from gradserve_server.tensors.transfers import Uploads
from tests.servers.separate_device import SeparateArray, SeparateDevice

SLOT_BYTES = 64
SIZES = {
    "an empty one": [0],
    "one byte": [1],
    "a slot": [64],
    "more than a slot": [65],
    "many slots": [1000],
    "many in a slot": [3] * 21,
    "across slots": [60, 0, 10, 130, 1, 63],
}
by_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "SLOT_BYTES", SLOT_BYTES)


class Bench:
    def __init__(self, sizes: list[int], slot_memory: int = 1 << 20) -> None:
        self.host, self.device = CpuDevice(BufferPool(0)), SeparateDevice()
        self.memory = Budget(slot_memory, "bytes")
        compute = InlineCompute()
        self.uploads = Uploads(self.host, self.device, compute, compute, np.empty, Memory(self.memory))
        budget = Budget(1 << 20, "bytes")
        specs = [TensorSpec(np.dtype(np.uint8), (size,)) for size in sizes]
        self.upload = Upload(specs, 1.0, _Places(Room(Reservation(budget)), Reservation(budget)), self.device.empty)
        random = np.random.default_rng(0)
        self.arrays = [random.integers(0, 255, size, np.uint8) for size in sizes]
        self.payload = b"".join(array.tobytes() for array in self.arrays)

    def check(self) -> None:
        for there, expected in zip(self.upload.arrays, self.arrays, strict=True):
            assert isinstance(there, SeparateArray)
            np.testing.assert_array_equal(there.hidden, expected)
        assert self.device.copied_in == len(self.payload)
        assert self.memory.used == 0


def chunks(payload: bytes, size: int) -> Iterator[memoryview]:
    for begin in range(0, len(payload), size):
        yield memoryview(payload)[begin : begin + size]


@by_sizes
@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10_000])
def test_chunks_of_a_stream(sizes: list[int], chunk_bytes: int) -> None:
    async def main() -> None:
        bench = Bench(sizes)
        async with bench.uploads.land(bench.upload, bench.device) as landing:
            for chunk in chunks(bench.payload, chunk_bytes):
                await landing.write(chunk)
            await landing.finish()
        bench.check()

    asyncio.run(main())


def test_what_has_arrived_is_copied_before_the_rest_is_there() -> None:
    async def main() -> None:
        bench = Bench([1000])
        async with bench.uploads.land(bench.upload, bench.device) as landing:
            await landing.write(memoryview(bench.payload)[: 5 * SLOT_BYTES])
            await asyncio.sleep(0)
            assert bench.device.copied_in == 5 * SLOT_BYTES
            assert bench.memory.used == 2 * SLOT_BYTES

    asyncio.run(main())


@pytest.mark.parametrize(("num_bytes", "message"), [(999, "got 999"), (1001, "got 1001")])
def test_a_payload_of_another_size(num_bytes: int, message: str) -> None:
    async def main() -> None:
        bench = Bench([1000])
        async with bench.uploads.land(bench.upload, bench.device) as landing:
            with contextlib.suppress(PayloadError):
                await landing.write(memoryview(bytes(num_bytes)))
            with pytest.raises(PayloadError, match=f"expected a payload of 1000 bytes as the header says, {message}"):
                await landing.finish()
        assert bench.memory.used == 0

    asyncio.run(main())


def test_slots_need_room() -> None:
    async def main() -> None:
        bench = Bench([1000], slot_memory=2 * SLOT_BYTES - 1)
        with pytest.raises(ResourceExhaustedError):
            async with bench.uploads.land(bench.upload, bench.device):
                pass

    asyncio.run(main())


@by_sizes
def test_parts_of_a_payload_are_copied_once_they_have_arrived(sizes: list[int]) -> None:
    async def main() -> None:
        bench = Bench(sizes)
        expected = [array.copy() for array in bench.arrays]
        for array in bench.arrays:
            array[...] = 0

        async def arrived(part: NDArray[Any]) -> None:
            owner = next(index for index, array in enumerate(bench.arrays) if np.shares_memory(array, part))
            begin = part.ctypes.data - bench.arrays[owner].ctypes.data
            part[...] = expected[owner][begin : begin + part.size]

        await bench.uploads.bring(bench.upload, bench.arrays, arrived)
        bench.check()

    asyncio.run(main())


def test_the_names_of_devices() -> None:
    bench = Bench([])
    for name, device in {"": bench.host, "cpu": bench.host, "separate:0": bench.device, "auto": bench.device}.items():
        assert bench.uploads.device(name, "device") is device
    with pytest.raises(InvalidArgumentError, match="expected cpu, separate:0 or auto, got 'cuda:7'") as refused:
        bench.uploads.device("cuda:7", "header.device")
    assert refused.value.field == "header.device"
