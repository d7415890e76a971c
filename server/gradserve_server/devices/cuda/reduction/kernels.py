"""The CUDA kernels of element-wise arithmetic on lists of arrays: their programs and arguments. Needs no GPU.

G is the dtype of gradients, S that of their sums, O that of the results: one of the two.
"""

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.kernels import ELEMENTS, instance
from gradserve_server.devices.cuda.program import Launch, Limits, Program, element_sources

DType = np.dtype[Any]

THREADS = 256
_VECTORS = 4
_VECTOR_BYTES = 16

MAX_SOURCES = 16
"""The sources that one launch adds up."""
INLINE_WORDS = 400
"""The words of a table that travels with the other arguments, of which CUDA takes 4096 bytes."""
ROW_WORDS = 4
"""The words of a row without sources."""
POSITION_BITS = 44
NOTHING = (1 << 64) - 1
"""What has been found when nothing is."""


_CONSTANTS = {
    "THREADS": THREADS,
    "VECTORS": _VECTORS,
    "MAX_SOURCES": MAX_SOURCES,
    "INLINE_WORDS": INLINE_WORDS,
    "ROW_WORDS": ROW_WORDS,
    "POSITION_BITS": POSITION_BITS,
}


class SumsKey(NamedTuple):
    """Names the program that adds gradients to sums."""

    gradient: DType
    total: DType


class ValuesKey(NamedTuple):
    """Names the program that checks gradients, and converts others to their dtype."""

    gradient: DType


Key = SumsKey | ValuesKey

_HALF, _BFLOAT16, _SINGLE, _DOUBLE = (
    np.dtype(each) for each in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)

SUMS = (
    SumsKey(_SINGLE, _SINGLE),
    SumsKey(_BFLOAT16, _SINGLE),
    SumsKey(_HALF, _SINGLE),
    SumsKey(_DOUBLE, _DOUBLE),
    SumsKey(_HALF, _HALF),
    SumsKey(_BFLOAT16, _BFLOAT16),
    SumsKey(_SINGLE, _DOUBLE),
    SumsKey(_HALF, _DOUBLE),
    SumsKey(_BFLOAT16, _DOUBLE),
)
"""The dtypes of gradients and of sums that hold every value of them, the most usual first."""
KEYS: tuple[Key, ...] = (*SUMS, *map(ValuesKey, ELEMENTS))

COMBINE = np.dtype(
    [
        *((name, np.int64) for name in ("table", "num_rows", "num_tiles", "tiles_per_block", "num_sources")),
        ("has_sum", np.int64),
        ("divides", np.int64),
        ("divisor", np.float64),
        ("factors", np.float64, (MAX_SOURCES,)),
        ("rows", np.int64, (INLINE_WORDS,)),
    ]
)
"""The argument of kernels that combine."""
CHECK = np.dtype(
    [
        *((name, np.int64) for name in ("table", "found", "num_rows", "num_tiles", "tiles_per_block")),
        ("rows", np.int64, (INLINE_WORDS,)),
    ]
)
"""The argument of kernels that check or convert."""


def combine_name(key: SumsKey, result: DType) -> str:
    """The name of the kernel that combines a sum with gradients; see reduction.cu."""
    return f"combine_{key.gradient.name}_in_{key.total.name}_to_{result.name}"


def find_name(dtype: DType) -> str:
    """The name of the kernel that finds the first element that is not finite."""
    return f"find_non_finite_{dtype.name}"


def convert_name(source: DType, result: DType) -> str:
    """The name of the kernel that converts elements."""
    return f"convert_{source.name}_to_{result.name}"


@functools.cache
def program(key: Key) -> Program:
    """The kernels for some dtypes."""
    constants = [f"constexpr int {name} = {value};" for name, value in _CONSTANTS.items()]
    parts = [*element_sources(), exact_source(), *constants, _source("numbers"), _source("reduction")]
    if isinstance(key, SumsKey):
        name = f"sums of {key.gradient.name} in {key.total.name}"
        instances = {combine_name(key, result): _combination(key, result) for result in dict.fromkeys(key)}
    else:
        name = f"values of {key.gradient.name}"
        instances = _of_values(key.gradient)
    return Program(name, "\n".join([*parts, *instances.values()]), tuple(instances))


def exact_source() -> str:
    """Returns the source of arithmetic that rounds each result by itself, in PTX."""
    return _source("exact")


def tile_size(*dtypes: DType) -> int:
    """The elements of a tile, for kernels that read and write arrays of these dtypes."""
    return THREADS * _VECTORS * (_VECTOR_BYTES // max(dtype.itemsize for dtype in dtypes))


def table_of(rows: Sequence[Sequence[int]], tile: int) -> tuple[NDArray[np.int64], int]:
    """Returns a table, and the number of its tiles.

    Args:
        rows: The number of elements of each array, not 0, and the addresses; see reduction.cu.
        tile: The elements of a tile.
    """
    words = np.empty((len(rows), 1 + len(rows[0])), np.int64)
    words[:, 1:] = rows
    tiles = -(-words[:, 1] // tile)
    ends = np.cumsum(tiles)
    words[:, 0] = ends - tiles
    return words, int(ends[-1])


def most_inline(rows: Sequence[Sequence[int]]) -> int:
    """Returns how many of some rows a table may have that travels with the other arguments."""
    return INLINE_WORDS // (1 + len(rows[0]))


def launch(kernel: str, arguments: NDArray[Any], num_tiles: int, limits: Limits) -> Launch:
    """Returns the launch of a kernel for a number of tiles, and notes in its argument how blocks share them."""
    most = limits.element_blocks * limits.num_multiprocessors
    per_block = -(-num_tiles // most)
    arguments["num_tiles"], arguments["tiles_per_block"] = num_tiles, per_block
    return Launch(kernel, (-(-num_tiles // per_block), 1), THREADS, 0)


def _source(name: str) -> str:
    return (resources.files(__package__) / f"{name}.cu").read_text("utf-8")


def _combination(key: SumsKey, result: DType) -> str:
    types = ", ".join(ELEMENTS[dtype] for dtype in (key.gradient, key.total, result))
    return instance(combine_name(key, result), str(THREADS), "CombineArguments", f"combine<{types}>")


def _of_values(dtype: DType) -> dict[str, str]:
    finds = f"find_non_finite<{ELEMENTS[dtype]}>"
    instances = {find_name(dtype): instance(find_name(dtype), str(THREADS), "CheckArguments", finds)}
    for source in ELEMENTS:
        if source != dtype:
            name, template = convert_name(source, dtype), f"convert<{ELEMENTS[source]}, {ELEMENTS[dtype]}>"
            instances[name] = instance(name, str(THREADS), "CheckArguments", template)
    return instances
