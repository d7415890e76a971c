"""Vectors for Numba's loops: as many numbers as fill 64 bytes.

LLVM puts them into whatever registers the processor has, so a sum consists of the same partial sums on every processor.
When LLVM vectorises a loop by itself, the number of partial sums depends on the width of the registers.

Importing this imports Numba, which takes half a second.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, models, register_model, type_callable

from gradserve_server.devices.host.intrinsics import (
    element_address,
    element_align,
    intrinsic,
    read_only,
    widen_element,
    widened,
)

_BYTES = 64

_NUM_WIDENED = 8
"""The number of partial sums of float32 that are added up in float64."""


class Lanes(types.Type):
    """The type of a vector of float32 or float64."""

    def __init__(self, dtype: Any) -> None:
        """Takes Numba's type of the numbers."""
        self.dtype = dtype
        self.count = _BYTES // (dtype.bitwidth // 8)
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Any) -> None:
        vector = ir.VectorType(manager[lanes.dtype].get_value_type(), lanes.count)
        super().__init__(manager, lanes, vector)  # type: ignore[no-untyped-call]


@intrinsic
def num_lanes(typing_context: Any, array: Any) -> Any:
    """Returns the number of elements of an array in a vector."""
    count = Lanes(widened(array.dtype)).count

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, count)

    return types.int64(array), generate


@intrinsic
def load_lanes(typing_context: Any, array: Any, index: Any) -> Any:
    """Returns a vector of the elements from array[index] on, widened for arithmetic. See `intrinsics.load`."""
    lanes = Lanes(widened(array.dtype))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature, args)
        vector = ir.VectorType(context.get_value_type(array.dtype), lanes.count)
        value = builder.load(builder.bitcast(address, vector.as_pointer()), align=element_align(array))
        read_only(builder, value)
        return widen_element(context, builder, array.dtype, value)

    return lanes(array, index), generate


@intrinsic
def write_lanes(typing_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Sets the elements from array[index] on to a vector's numbers. The kernel may also read them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature, args)
        builder.store(args[2], builder.bitcast(address, args[2].type.as_pointer()), align=element_align(array))
        return context.get_dummy_value()

    return types.void(array, index, lanes), generate


@intrinsic
def in_all_lanes(typing_context: Any, number: Any) -> Any:
    """Returns a vector with a float32 or float64 in every place."""
    lanes = Lanes(number)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0], lanes.count)

    return lanes(number), generate


@intrinsic
def where_positive(typing_context: Any, lanes: Any, tested: Any) -> Any:
    """Returns a vector with 0 in place of the numbers for which another vector is not above 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(context.get_value_type(lanes), None)
        return builder.select(builder.fcmp_ordered(">", args[1], zero), args[0], zero)

    return lanes(lanes, tested), generate


@intrinsic
def last_lanes(typing_context: Any, lanes: Any, count: Any) -> Any:
    """Returns a vector with 0 in place of all numbers but the last `count`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.IntType(lanes.dtype.bitwidth)
        count = builder.trunc(args[1], bits) if bits.width < args[1].type.width else args[1]
        places = ir.Constant(ir.VectorType(bits, lanes.count), list(range(lanes.count, 0, -1)))
        is_last = builder.icmp_signed("<=", places, _spread(builder, count, lanes.count))
        return builder.select(is_last, args[0], ir.Constant(args[0].type, None))

    return lanes(lanes, types.int64), generate


@intrinsic
def sum_of_lanes(typing_context: Any, lanes: Any) -> Any:
    """Returns the sum of the numbers of a vector, a float64.

    They are added in pairs, the first half to the second, in their own dtype while there are more than 8, then in
    float64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (vector,) = args
        count = lanes.count
        while count > 1:
            if count == _NUM_WIDENED and lanes.dtype == types.float32:
                vector = builder.fpext(vector, ir.VectorType(ir.DoubleType(), count))
            count //= 2
            low, high = (
                builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _indices(half))
                for half in (range(count), range(count, 2 * count))
            )
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, _i32(0))

    return types.float64(lanes), generate


def _spread(builder: Any, value: Any, count: int) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _i32(0)), nothing, _indices([0] * count))


def _i32(value: int) -> Any:
    return ir.Constant(ir.IntType(32), value)


def _indices(indices: Any) -> Any:
    numbers = list(indices)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


def _define(operators: tuple[Callable[[Any, Any], Any], ...], instruction: str) -> None:
    def typer(left: Any, right: Any) -> Any:
        return left if isinstance(left, Lanes) and left == right else None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    for each in operators:
        type_callable(each)(lambda context: typer)
        lower_builtin(each, Lanes, Lanes)(generate)  # type: ignore[no-untyped-call]


_define((operator.add, operator.iadd), "fadd")
_define((operator.sub,), "fsub")
_define((operator.mul,), "fmul")
