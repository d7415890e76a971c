"""Batch normalization on a GPU: the cuts of its arrays, the CUDA programs, and the launches that compute a call.

An array is cut into vectors, columns, tiles and blocks, which tile.cu defines. All functions are pure, so that tests
can run the launches without a GPU. Importing this needs no GPU.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from struct import pack_into
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import (
    ELEMENTS,
    KernelDevice,
    Launch,
    Limits,
    Program,
    Programs,
    element_sources,
    instance,
)
from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
)
from gradserve_server.tensors.spec import MOST_USUAL_FIRST, widened

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


Operation: TypeAlias = Literal["forward", "gradient"]

KERNELS: dict[Operation, tuple[str, ...]] = {
    "forward": ("forward_moments", "forward_normalize", "forward_whole"),
    "gradient": ("gradient_sums", "gradient_apply", "gradient_whole", "gradient_frozen"),
}
"""The templates, by operation; each exists for every dtype, vector width and number of lanes."""

LAYOUT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "channels",
            "inner",
            "positions",
            "row_positions",
            "row_stride",
            "step",
            "step_remainder",
            "step_offset",
            "wrap_offset",
            "column_bits",
        )
    ]
)
INPUTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("x", "scale", "offset", "mean", "variance"),
    "gradient": ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2"),
}
"""The inputs that kernels read, by operation, with their names in spec.py."""
OUTPUTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"),
    "gradient": ("x_backprop", "scale_backprop", "offset_backprop"),
}
"""The outputs that kernels write, by operation."""
_SCRATCH = ("partial_sums", "tickets")
_SCALARS: dict[Operation, tuple[str, ...]] = {
    "forward": ("epsilon", "exponential_avg_factor", "bessel_correction", "is_training"),
    "gradient": ("epsilon", "inverse_count"),
}
_SUMS: dict[Operation, tuple[int, int]] = {"forward": (2, 1), "gradient": (2, 0)}
"""The number of sums that a thread has for each lane, and of others."""
_TENSORS: dict[Operation, int] = {"forward": 1, "gradient": 2}
"""The number of tensors that the kernels of an operation read."""


@dataclass(frozen=True)
class LaunchPlan:
    """The launches that compute one call.

    Attributes:
        operation: The operation, whose program has the kernels.
        launches: The launches, one after another.
        arguments: The argument of every launch, a struct as in `arguments_dtype`, without its addresses.
        num_partial_sums: The size of the scratch memory `partial_sums`, in elements of U.
        num_tickets: The size of `tickets`, in uint32 elements, which are 0 before and after.
    """

    operation: Operation
    launches: tuple[Launch, ...]
    arguments: bytes
    num_partial_sums: int
    num_tickets: int

    def with_addresses(self, addresses: Sequence[int]) -> NDArray[Any]:
        """Returns the struct, as an array of one element, with the addresses of inputs, outputs and scratch memory."""
        struct = bytearray(self.arguments)
        pack_into(f"={len(addresses)}Q", struct, 0, *addresses)
        return np.frombuffer(struct, np.void(len(struct)).dtype)


def arguments_dtype(operation: Operation, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The struct that kernels take, in the layout of C++."""
    pointers = [(name, np.uint64) for name in (*INPUTS[operation], *OUTPUTS[operation], *_SCRATCH)]
    scalars = [(name, widened(dtype)) for name in _SCALARS[operation]]
    return np.dtype([*pointers, ("layout", LAYOUT), *scalars], align=True)


def shapes(dtype: np.dtype[Any]) -> tuple[tuple[int, int], ...]:
    """All pairs of a vector's width and its lanes."""
    return tuple((width, lanes) for width in vector_widths(dtype.itemsize) for lanes in dict.fromkeys((width, 1)))


def kernel_name(kernel: str, dtype: np.dtype[Any], width: int, lanes: int) -> str:
    """The name of an instance of a template."""
    return f"{kernel}_{dtype.name}_{width}_{lanes}"


@functools.cache
def source_parts(operation: Operation) -> tuple[str, ...]:
    """The files of a program: the shared ones, and the templates of the kernels."""
    folder = resources.files(__package__)
    own = [(folder / f"{name}.cu").read_text(encoding="utf-8") for name in ("tile", operation)]
    return (*element_sources(), *own)


def instances(operation: Operation, dtype: np.dtype[Any]) -> dict[str, str]:
    """The definition of every kernel, by name."""
    element = ELEMENTS[dtype]
    struct = f"{operation.capitalize()}Arguments<Param<{element}>>"
    definitions = {}
    for kernel in KERNELS[operation]:
        for width, lanes in shapes(dtype):
            name = kernel_name(kernel, dtype, width, lanes)
            bounds = f"{MAX_THREADS}, {blocks_per_multiprocessor(width, dtype.itemsize)}"
            definitions[name] = instance(name, bounds, struct, f"{kernel}<{element}, {width}, {lanes}>")
    return definitions


@functools.cache
def program(operation: Operation, dtype: np.dtype[Any]) -> Program:
    """All kernels of an operation for one dtype."""
    definitions = instances(operation, dtype)
    source = "\n".join([*source_parts(operation), *definitions.values()])
    return Program(f"batch_norm {operation} {dtype.name}", source, tuple(definitions))


def plan_forward(
    geometry: Geometry, dtype: np.dtype[Any], attributes: ForwardAttributes, is_aligned: bool, limits: Limits
) -> LaunchPlan:
    """Plans FusedBatchNorm; `is_aligned` if all addresses are multiples of a vector's size."""
    kernels = ("forward_moments", "forward_normalize") if attributes.is_training else ("forward_normalize",)
    scalars = {
        "epsilon": attributes.epsilon,
        "exponential_avg_factor": attributes.exponential_avg_factor,
        "bessel_correction": geometry.count / max(geometry.count - 1, 1),
        "is_training": float(attributes.is_training),
    }
    return _plan("forward", kernels, scalars, geometry, dtype, is_aligned, limits)


def plan_gradient(
    geometry: Geometry, dtype: np.dtype[Any], attributes: GradAttributes, is_aligned: bool, limits: Limits
) -> LaunchPlan:
    """Plans FusedBatchNormGrad; `is_aligned` if all addresses are multiples of a vector's size."""
    kernels = ("gradient_sums", "gradient_apply") if attributes.is_training else ("gradient_frozen",)
    scalars = {"epsilon": attributes.epsilon, "inverse_count": 1 / max(geometry.count, 1)}
    return _plan("gradient", kernels, scalars, geometry, dtype, is_aligned, limits)


def _plan(
    operation: Operation,
    kernels: tuple[str, ...],
    scalars: dict[str, float],
    geometry: Geometry,
    dtype: np.dtype[Any],
    is_aligned: bool,
    limits: Limits,
) -> LaunchPlan:
    geometry = canonical(geometry)
    width = vector_width(geometry, dtype.itemsize, is_aligned)
    sums_per_lane, extra_sums = _SUMS[operation]
    itemsize = widened(dtype).itemsize

    def shared_bytes(tiling: Tiling) -> int:
        return tiling.sums_bytes(sums_per_lane, extra_sums, itemsize)

    def whole_shared_bytes(tiling: Tiling) -> int:
        return shared_bytes(tiling) + tiling.kept_bytes(_TENSORS[operation], dtype.itemsize)

    # If the data for both passes of a whole tile fits into shared memory, memory is read once.
    candidates = whole_tilings(geometry, width, dtype.itemsize, limits) if len(kernels) == 2 else []
    tiling = next((tiling for tiling in candidates if whole_shared_bytes(tiling) <= limits.shared_bytes), None)
    if tiling is not None:
        kernels, num_shared_bytes = (f"{operation}_whole",), whole_shared_bytes(tiling)
    else:
        tiling = split_tiling(geometry, width, dtype.itemsize, limits)
        num_shared_bytes = shared_bytes(tiling)
    launches = tuple(
        Launch(
            kernel_name(kernel, dtype, width, tiling.lanes),
            (tiling.tiles, tiling.splits),
            tiling.threads,
            num_shared_bytes,
        )
        for kernel in kernels
    )
    arguments = np.zeros((), arguments_dtype(operation, dtype))
    arguments["layout"] = _layout(geometry, tiling)
    for name, value in scalars.items():
        arguments[name] = value
    blocks = tiling.tiles * tiling.splits
    num_partial_sums = blocks * tiling.columns * (sums_per_lane * tiling.lanes + extra_sums)
    if tiling.splits == 1:
        num_partial_sums = 0
    return LaunchPlan(operation, launches, arguments.tobytes(), num_partial_sums, tiling.tiles)


def _layout(geometry: Geometry, tiling: Tiling) -> NDArray[Any]:
    elements = tiling.width // tiling.lanes
    row_positions = max(geometry.inner // elements, 1)
    row_stride = geometry.channels * geometry.inner
    step = tiling.rows * tiling.splits
    rows, remainder = divmod(step, row_positions)
    layout = np.zeros((), LAYOUT)
    values = {
        "channels": geometry.channels,
        "inner": geometry.inner,
        "positions": tiling.positions,
        "row_positions": row_positions,
        "row_stride": row_stride,
        "step": step,
        "step_remainder": remainder,
        "step_offset": rows * row_stride + remainder * elements,
        "wrap_offset": row_stride - row_positions * elements,
        "column_bits": tiling.columns.bit_length() - 1,
    }
    for name, value in values.items():
        layout[name] = value
    return layout


_KEPT_PLANS = 1024
_INPUTS = {operation: attrgetter(*names) for operation, names in INPUTS.items()}
_OUTPUTS = {operation: attrgetter(*names) for operation, names in OUTPUTS.items()}


class CudaBatchNorm:
    """FusedBatchNorm and FusedBatchNormGrad by kernels of our own. Safe to use from several threads.

    Sums are in U and always in the same order, so results depend only on the inputs and on the kind of GPU. Numbers
    below the normal range of U count as zero.
    """

    fuses_relu = False

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._plan_forward = functools.lru_cache(_KEPT_PLANS)(plan_forward)
        self._plan_gradient = functools.lru_cache(_KEPT_PLANS)(plan_gradient)
        self._programs = Programs(
            device, lambda key: program(key[1], key[0]), itertools.product(MOST_USUAL_FIRST, KERNELS)
        )

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._programs.prepare(stop)

    def forward(
        self, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry, *, has_relu: bool = False
    ) -> ForwardOutputs:
        """Computes FusedBatchNorm, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        assert not has_relu, "see `fuses_relu`"
        x, param_dtype = inputs.x, inputs.scale.dtype
        per_channel = (geometry.channels,)
        outputs = ForwardOutputs(
            y=self._device.empty(x.shape, x.dtype),
            batch_mean=self._device.empty(per_channel, param_dtype),
            batch_variance=self._device.empty(per_channel, param_dtype),
            reserve_space_1=self._device.empty(per_channel, param_dtype),
            reserve_space_2=self._device.empty(per_channel, param_dtype),
            reserve_space_3=self._device.empty((), param_dtype),
        )
        addresses = self._addresses("forward", inputs, outputs)
        plan = self._plan_forward(geometry, x.dtype, attributes, _are_aligned(addresses), self._device.limits)
        self._run(plan, x.dtype, addresses)
        return outputs

    def gradient(
        self, inputs: GradInputs, attributes: GradAttributes, geometry: Geometry, relu_offset: Array | None = None
    ) -> GradOutputs:
        """Computes FusedBatchNormGrad, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        assert relu_offset is None, "see `fuses_relu`"
        x, param_dtype = inputs.x, inputs.scale.dtype
        per_channel = (geometry.channels,)
        outputs = GradOutputs(
            x_backprop=self._device.empty(x.shape, x.dtype),
            scale_backprop=self._device.empty(per_channel, param_dtype),
            offset_backprop=self._device.empty(per_channel, param_dtype),
            reserve_space_4=self._device.empty((0,), param_dtype),
            reserve_space_5=self._device.empty((0,), param_dtype),
        )
        addresses = self._addresses("gradient", inputs, outputs)
        plan = self._plan_gradient(geometry, x.dtype, attributes, _are_aligned(addresses), self._device.limits)
        self._run(plan, x.dtype, addresses)
        return outputs

    def _addresses(self, operation: Operation, inputs: Any, outputs: Any) -> list[int]:
        arrays = (*_INPUTS[operation](inputs), *_OUTPUTS[operation](outputs))
        return [self._device.address(array) for array in arrays]

    def _run(self, plan: LaunchPlan, dtype: np.dtype[Any], addresses: list[int]) -> None:
        partial_sums = tickets = 0
        if plan.num_partial_sums:
            itemsize = widened(dtype).itemsize
            partial_sums = self._device.scratch(plan.num_partial_sums * itemsize)
            tickets = self._device.tickets(plan.num_tickets)
        arguments = plan.with_addresses([*addresses, partial_sums, tickets])
        program = self._programs[dtype, plan.operation]
        for launch in plan.launches:
            program.launch(launch, arguments)


def _are_aligned(addresses: list[int]) -> bool:
    """True if vectors can be loaded from all addresses; false only if an array is part of another one."""
    return all(address % VECTOR_BYTES == 0 for address in addresses)
