"""Packed versions of parameters, each made once for all who read it with the same codec."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.codecs import Codec, UnpackableError
from gradserve_server.accumulators.gradient import Array
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks

PackedValues = Mapping[str, NDArray[np.uint8]]
"""The packed components of a version, by name."""
RunAll = Callable[[Sequence[Callable[[], object]]], None]
"""Calls functions, perhaps in several threads, and returns when all have returned."""

_MOST_KEPT = 2
"""The packed versions that are kept for each parameters: the newest, and one for another codec or a late reader."""
_PART = 1 << 20
"""The values that a thread packs at a time, a multiple of all blocks."""


def one_by_one(pieces: Sequence[Callable[[], object]]) -> None:
    """Calls functions in this thread."""
    for piece in pieces:
        piece()


class PackedVersions:
    """Packs the versions of one parameters, and keeps the latest results. Used on the event loop only."""

    def __init__(self, compute: Compute, memory: Reservation, run_all: RunAll = one_by_one) -> None:
        """Takes what packs, and where the memory of the results counts.

        Args:
            compute: Runs what takes long away from the event loop.
            memory: A reservation of the owners of the memory, for others like it.
            run_all: Runs the parts of that on several cores.
        """
        self._compute = compute
        self._memory = memory
        self._run_all = run_all
        self._tasks = BackgroundTasks()
        self._kept: dict[tuple[bytes, str], tuple[asyncio.Task[PackedValues], Reservation]] = {}
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """The memory of those that are kept."""
        return sum([memory.used for _, memory in self._kept.values()])

    async def of(self, version: Version, codec: Codec) -> PackedValues:
        """Returns a version packed with a codec. Goes on if the caller is cancelled, for others.

        Raises:
            InvalidArgumentError: A value does not fit into the codec.
            ResourceExhaustedError: There is not enough memory.
        """
        key = (version.digest, codec.name)
        kept = self._kept.pop(key, None)
        if kept is None:
            sizes: dict[str, Any] = dict(version.values)
            memory = self._memory.another(sum([codec.num_bytes(value.size) for value in sizes.values()]))
            kept = self._tasks.begin(self._pack(key, version, codec)), memory
        self._kept[key] = kept
        while len(self._kept) > _MOST_KEPT:
            self._forget(next(iter(self._kept)))
        try:
            return await asyncio.shield(kept[0])
        finally:
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Forgets all, and gives their memory back; keeps none from now on."""
        self._is_closed = True
        for key in list(self._kept):
            self._forget(key)

    async def _pack(self, key: tuple[bytes, str], version: Version, codec: Codec) -> PackedValues:
        values: dict[str, Any] = dict(version.values)
        work = max(2 * version.nbytes, PIECE_BYTES * len(values))
        try:
            return await self._compute.run(work, packed_values, values, codec, self._run_all)
        except BaseException:
            self._forget(key)
            raise

    def _forget(self, key: tuple[bytes, str]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept[1].settle(0)


def packed_values(values: Mapping[str, Array], codec: Codec, run_all: RunAll = one_by_one) -> PackedValues:
    """Packs the components of a version.

    Raises:
        InvalidArgumentError: A value does not fit into the codec.
    """
    packed = {name: np.empty(codec.num_bytes(value.size), np.uint8) for name, value in values.items()}
    errors: dict[str, str] = {}
    run_all([piece for name, value in values.items() for piece in _pieces(name, value, codec, packed[name], errors)])
    for name in values:
        if name in errors:
            raise InvalidArgumentError(f"component {quoted(name)} of the version: {errors[name]}", field="codec")
    for array in packed.values():
        array.flags.writeable = False
    return packed


def _pieces(
    name: str, value: Array, codec: Codec, packed: NDArray[np.uint8], errors: dict[str, str]
) -> Iterable[Callable[[], object]]:
    flat = value.reshape(-1)

    def pack(begin: int) -> None:
        start = begin // codec.block_size * codec.block_bytes
        try:
            part = codec.encode(flat[begin : begin + _PART])
        except UnpackableError as error:
            errors[name] = str(error)
        else:
            packed[start : start + part.size] = part

    return [partial(pack, begin) for begin in range(0, flat.size, _PART)]
