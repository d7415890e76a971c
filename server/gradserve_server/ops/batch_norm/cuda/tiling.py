"""Cuts an array into vectors, columns, tiles and blocks for the batch normalization kernels.

The terms are defined in tile.cu.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from gradserve_server.devices.cuda.program import Limits
from gradserve_server.ops.batch_norm.spec import Geometry

VECTOR_BYTES = 16
"""The most bytes that one instruction loads."""
MAX_THREADS = 512
"""The most threads of a block, for which kernels are compiled."""

_MAX_COLUMNS = 32
_MIN_THREADS = 2 * _MAX_COLUMNS
"""The least threads of a block: its sums take the shared memory of half its threads, and each column has sums."""
_SECTOR_BYTES = 32
"""The fewest bytes that a memory access moves."""
_POSITIONS_PER_THREAD = 4
"""The vectors that a thread loads at a time. Finer cuts give more threads, each with less to do while it waits."""
_GOOD_OCCUPANCY = 0.97
"""The sufficient share of slots for blocks in use: filling the last few is not worth more partial sums."""
_FLAG_BYTES = 16
"""The memory before the sums, where a block notes whether it is the last of its tile."""


@dataclass(frozen=True)
class Tiling:
    """One way to cut an array.

    Attributes:
        width: The number of elements of a vector.
        lanes: The number of channels of a vector: 1 or `width`.
        columns: The number of columns of a tile.
        tiles: The number of tiles, side by side.
        splits: The number of blocks that share a tile.
        threads: The number of threads of a block.
        positions: The number of vectors of a column.
    """

    width: int
    lanes: int
    columns: int
    tiles: int
    splits: int
    threads: int
    positions: int

    @property
    def rows(self) -> int:
        """The number of threads of a block that share a column."""
        return self.threads // self.columns

    @property
    def positions_per_thread(self) -> int:
        """The most vectors that a thread visits."""
        return -(-self.positions // (self.rows * self.splits))

    def sums_bytes(self, sums_per_lane: int, extra_sums: int, param_itemsize: int) -> int:
        """The shared memory for the sums of a block's threads, and for the flag before them."""
        num_sums = (self.threads // 2) * (sums_per_lane * self.lanes + extra_sums)
        return _FLAG_BYTES + -(-num_sums * param_itemsize // VECTOR_BYTES) * VECTOR_BYTES

    def kept_bytes(self, num_tensors: int, itemsize: int) -> int:
        """The shared memory for a block's share of this many tensors."""
        return self.positions_per_thread * self.threads * self.width * itemsize * num_tensors


def canonical(geometry: Geometry) -> Geometry:
    """Returns a geometry in which a single channel is one contiguous image, whatever its format."""
    return Geometry(1, 1, geometry.count) if geometry.channels == 1 else geometry


def vector_widths(itemsize: int) -> tuple[int, ...]:
    """The widths that kernels exist for, widest first."""
    full = VECTOR_BYTES // itemsize
    return (8, 4, 1) if itemsize == 2 else (full, 1)


def vector_width(geometry: Geometry, itemsize: int, is_aligned: bool) -> int:
    """The widest vectors into which channels, or images, can be cut; single elements if an array is not aligned."""
    if not is_aligned:
        return 1
    run = geometry.channels if geometry.inner == 1 else geometry.inner
    return next(w for w in vector_widths(itemsize) if run % w == 0)


def blocks_per_multiprocessor(width: int, itemsize: int) -> int:
    """The number of the largest blocks for which a multiprocessor has registers.

    Vectors of eight elements, and float64, need more than 64 registers, the most for each of 1024 threads.
    """
    return 1 if width == 8 or itemsize == 8 else 2


def whole_tilings(geometry: Geometry, width: int, itemsize: int, limits: Limits) -> list[Tiling]:
    """The tilings with one block per tile, the best first if its tensors fit into shared memory.

    Wide tiles read longer runs. Narrow ones give more blocks, which helps until all multiprocessors have one.
    """
    tilings = [_tiling(geometry, width, columns) for columns in _column_choices(geometry, width, itemsize)]
    busy = [tiling for tiling in tilings if tiling.tiles >= limits.num_multiprocessors]
    return busy + [tiling for tiling in reversed(tilings) if tiling not in busy]


def split_tiling(geometry: Geometry, width: int, itemsize: int, limits: Limits) -> Tiling:
    """The tiling whose blocks keep all multiprocessors equally busy."""
    tilings = [_tiling(geometry, width, columns) for columns in _column_choices(geometry, width, itemsize)]
    fewest = min(tiling.tiles * tiling.columns for tiling in tilings)
    tiling = next(tiling for tiling in tilings if tiling.tiles * tiling.columns == fewest)
    blocks = blocks_per_multiprocessor(width, itemsize) * MAX_THREADS // tiling.threads
    slots = limits.num_multiprocessors * blocks
    useful = tiling.positions // (tiling.rows * _POSITIONS_PER_THREAD)
    splits = balanced_splits(tiling.tiles, slots, max(1, useful))
    return dataclasses.replace(tiling, splits=splits)


def balanced_splits(tiles: int, slots: int, most: int) -> int:
    """The smallest number of splits, up to `most`, that uses almost all of the device's slots for blocks."""

    def occupancy(splits: int) -> float:
        blocks = tiles * splits
        return blocks / (-(-blocks // slots) * slots)

    candidates = range(1, min(most, max(4 * slots // tiles, 1)) + 1)
    good = (splits for splits in candidates if occupancy(splits) >= _GOOD_OCCUPANCY)
    return next(good, None) or max(candidates, key=occupancy)


def _tiling(geometry: Geometry, width: int, columns: int) -> Tiling:
    lanes = width if geometry.inner == 1 else 1
    positions = geometry.count * lanes // width
    wanted = columns * positions // _POSITIONS_PER_THREAD
    threads = min(max(_power_of_two(wanted), _MIN_THREADS), MAX_THREADS)
    tiles = max(-(-geometry.channels // (lanes * columns)), 1)
    return Tiling(width, lanes, columns, tiles, 1, threads, positions)


def _column_choices(geometry: Geometry, width: int, itemsize: int) -> list[int]:
    """The possible numbers of columns, largest first: only 1 with channels first, where a column is contiguous."""
    if geometry.inner != 1:
        return [1]
    groups = max(geometry.channels // width, 1)
    least = min(_SECTOR_BYTES // (width * itemsize), groups)
    powers = itertools.takewhile(lambda columns: columns <= _MAX_COLUMNS, (1 << bits for bits in itertools.count()))
    return [columns for columns in powers if least <= columns < 2 * groups][::-1]


def _power_of_two(number: int) -> int:
    """The largest power of two up to `number`; 1 for less."""
    return 1 << int(math.log2(number)) if number > 0 else 1
