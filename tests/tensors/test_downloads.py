"""Tensors leave the memory of their device piece by piece."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute, ThreadCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget
from gradserve_server.tensors import transfers as downloads
from gradserve_server.tensors.transfers import Downloads
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.separate_device import SeparateArray, SeparateDevice

SLOT_BYTES = 64
SIZES = {
    "none": [],
    "an empty one": [0],
    "one byte": [1],
    "a slot": [64],
    "more than a slot": [65],
    "many slots": [1000],
    "many in a slot": [3] * 21,
    "across slots": [60, 0, 10, 130, 1, 63],
}


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SLOT_BYTES", SLOT_BYTES)


def arrays_of(sizes: list[int], is_there: Callable[[int], bool]) -> tuple[list[Any], bytes]:
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 255, size, np.uint8) for size in sizes]
    given = [SeparateArray(array) if is_there(index) else array for index, array in enumerate(arrays)]
    return given, b"".join(array.tobytes() for array in arrays)


def make(device: SeparateDevice, memory: Budget, compute: Any, allocate: Any = np.empty) -> Downloads:
    return Downloads(CpuDevice(BufferPool(0)), device, compute, allocate, memory)


@pytest.mark.parametrize("is_there", [lambda _: True, lambda index: index % 2 == 0], ids=["all there", "some there"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_pieces_are_the_bytes(sizes: list[int], is_there: Callable[[int], bool]) -> None:
    async def main() -> None:
        device, memory = SeparateDevice(), Budget(1 << 20, "bytes")
        arrays, expected = arrays_of(sizes, is_there)
        pieces = [bytes(piece) async for piece in make(device, memory, InlineCompute()).pieces(arrays)]
        assert b"".join(pieces) == expected
        assert all(len(piece) == SLOT_BYTES for piece in pieces[:-1])
        assert memory.used == 0

    asyncio.run(main())


@pytest.mark.parametrize("alignment", [8, 64])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_arrays_are_aligned_with_zeros_between(sizes: list[int], alignment: int) -> None:
    async def main() -> None:
        device, memory = SeparateDevice(), Budget(1 << 20, "bytes")
        arrays, _ = arrays_of(sizes, lambda _: True)
        expected = b""
        for array in arrays:
            if array.nbytes:
                expected += bytes(-len(expected) % alignment) + array.hidden.tobytes()
        downloads = make(device, memory, InlineCompute(), lambda shape, dtype: np.full(shape, 0xAA, dtype))
        pieces = [bytes(piece) async for piece in downloads.pieces(arrays, alignment=alignment)]
        assert b"".join(pieces) == expected

    asyncio.run(main())


def test_the_first_piece_comes_before_the_rest_is_copied() -> None:
    async def main() -> None:
        device, memory = SeparateDevice(), Budget(2 * SLOT_BYTES, "bytes")
        arrays, expected = arrays_of([10 * SLOT_BYTES], lambda _: True)
        pieces = make(device, memory, InlineCompute()).pieces(arrays)
        assert bytes(await anext(pieces)) == expected[:SLOT_BYTES]
        assert device.copied_out <= 2 * SLOT_BYTES
        await pieces.aclose()
        assert memory.used == 0

    asyncio.run(main())


def test_slots_need_room() -> None:
    async def main() -> None:
        arrays, _ = arrays_of([10 * SLOT_BYTES], lambda _: True)
        pieces = make(SeparateDevice(), Budget(2 * SLOT_BYTES - 1, "bytes"), InlineCompute()).pieces(arrays)
        with pytest.raises(ResourceExhaustedError):
            await anext(pieces)

    asyncio.run(main())


def test_who_leaves_waits_for_the_copy_under_way() -> None:
    """Its slot would be used for something else."""

    class Slow(SeparateDevice):
        begun = threading.Event()
        go_on = threading.Event()

        def read(self, array: SeparateArray, offset: int, target: np.ndarray) -> None:
            if offset:
                self.begun.set()
                assert self.go_on.wait(PATIENCE_SECONDS)
            super().read(array, offset, target)

    async def main() -> None:
        device, memory, compute = Slow(), Budget(1 << 20, "bytes"), ThreadCompute(1)
        arrays, _ = arrays_of([10 * SLOT_BYTES], lambda _: True)
        pieces = make(device, memory, compute).pieces(arrays)
        await anext(pieces)
        await asyncio.to_thread(device.begun.wait)
        leaving = asyncio.ensure_future(pieces.aclose())
        await asyncio.sleep(0)
        assert not leaving.done()
        assert memory.used
        device.go_on.set()
        await leaving
        assert memory.used == 0
        compute.close()

    asyncio.run(main())
