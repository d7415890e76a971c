"""Additions to Numba's language for our kernels: half precision, arrays that do not overlap, counters for threads.

Importing this imports Numba, which takes half a second.

Numba has no arrays of float16 or bfloat16. They are passed as arrays of integers with the same bits: int16 for float16
and uint16 for bfloat16. Their arithmetic is in float32; for every other dtype it is in the dtype itself.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.extending import register_jitable

from gradserve_server.devices.host import half_precision
from gradserve_server.devices.host.half_precision import widened

intrinsic: Callable[[Any], Any] = extending.intrinsic
"""Numba's decorator, retyped: its annotations would give the result the signature of the decorated function."""

_NUM_PLACES = 6

DONE = 0
"""The index of the counter of finished chunks, in every kernel."""


@intrinsic
def read(typing_context: Any, array: Any, index: Any) -> Any:
    """Returns array[index], widened for arithmetic. The kernel may also write the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(element_address(context, builder, signature, args), align=element_align(array))
        return half_precision.widen(context, builder, array.dtype, value)

    return widened(array.dtype)(array, index), generate


@intrinsic
def write(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`, rounded as by `store`. The kernel may also `read` the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = _narrow(context, builder, array, args[2], value)
        builder.store(number, element_address(context, builder, signature, args), align=element_align(array))
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Returns array[index], widened for arithmetic.

    The kernel must not write the array. Numba does not tell LLVM that arrays do not overlap, so LLVM does not vectorise
    loops with more than a few arrays; `load` tells LLVM that it reads nothing that `store` has written.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(element_address(context, builder, signature, args), align=element_align(array))
        read_only(builder, value)
        return half_precision.widen(context, builder, array.dtype, value)

    return widened(array.dtype)(array, index), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`, rounded to the nearest number, ties to even; NaN remains NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = _narrow(context, builder, array, args[2], value)
        stored = builder.store(number, element_address(context, builder, signature, args), align=element_align(array))
        stored.set_metadata("alias.scope", _written(builder))
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def store_at(typing_context: Any, place: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`.

    `store` tells LLVM that it writes nothing that `load` reads. This adds that stores with different places, which are
    literal numbers, write to different memory. Otherwise LLVM compares all addresses that a loop writes before it runs
    the loop with vectors.
    """
    if not isinstance(place, types.IntegerLiteral):
        return None  # Numba calls this again with the literal

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = context.cast(builder, args[3], value, array.dtype)
        base = context.make_array(array)(context, builder, args[1]).data
        stored = builder.store(number, builder.gep(base, [args[2]], inbounds=True), align=array.dtype.bitwidth // 8)
        module = builder.module
        domain = module.add_metadata(["gradserve: places"])
        places = [module.add_metadata([f"gradserve: place {number}", domain]) for number in range(_NUM_PLACES)]
        own = places.pop(place.literal_value)
        stored.set_metadata("alias.scope", module.add_metadata([_written_scope(builder), own]))
        stored.set_metadata("noalias", module.add_metadata(places))
        return context.get_dummy_value()

    return types.void(place, array, index, value), generate


@intrinsic
def widen(typing_context: Any, array: Any, value: Any) -> Any:
    """Returns `value` in the dtype of arithmetic with elements of `array`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, widened(array.dtype))

    return widened(array.dtype)(array, value), generate


@intrinsic
def count_up(typing_context: Any, counters: Any, index: Any) -> Any:
    """Adds one to counters[index] of an int64 array, atomically among threads; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = element_address(context, builder, signature, args)
        return builder.atomic_rmw("add", address, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counters, index), generate


@register_jitable
def wait_for(counters: Any, index: Any, value: Any) -> None:
    """Waits until other threads have counted counters[index] up to `value`. For short waits only: it does not sleep."""
    while _read(counters, index) < value:
        yield_processor()


@intrinsic
def _read(typing_context: Any, counters: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(element_address(context, builder, signature, args), "acquire", align=8)

    return types.int64(counters, index), generate


@intrinsic
def add_atomically(typing_context: Any, array: Any, row: Any, column: Any, amount: Any) -> Any:
    """Adds to array[row, column] of an int64 array; returns the old value. All threads see the same order of this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address_in_row(context, builder, signature, args)
        return builder.atomic_rmw("add", address, context.cast(builder, args[3], amount, types.int64), "seq_cst")

    return types.int64(array, types.int64, types.int64, types.int64), generate


@intrinsic
def read_atomically(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Returns array[row, column] of an int64 array, in the same order as `add_atomically`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_address_in_row(context, builder, signature, args), "seq_cst", align=8)

    return types.int64(array, types.int64, types.int64), generate


def _address_in_row(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    columns = builder.extract_value(array.shape, 1)
    return builder.gep(array.data, [builder.add(builder.mul(args[1], columns), args[2])], inbounds=True)


yield_processor = types.ExternalFunction("sched_yield", types.int32())
"""Lets another thread have the processor, if one waits for it."""


def element_address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Returns the address of array[index] for the arguments of an intrinsic that begin with both."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]], inbounds=True)


def element_align(array: Any) -> int:
    """Returns the alignment of the elements of an array, in bytes."""
    return int(array.dtype.bitwidth // 8)


def read_only(builder: Any, value: Any) -> None:
    """Marks a loaded value as one that no `store` writes."""
    value.set_metadata("noalias", _written(builder))


def _narrow(context: Any, builder: Any, array: Any, number: Any, dtype: Any) -> Any:
    number = context.cast(builder, number, dtype, widened(array.dtype))
    return half_precision.narrow(context, builder, array.dtype, number)


def _written(builder: Any) -> Any:
    """The alias scope, in LLVM's sense, of everything that `store` writes."""
    return builder.module.add_metadata([_written_scope(builder)])


def _written_scope(builder: Any) -> Any:
    module = builder.module
    return module.add_metadata(["gradserve: written", module.add_metadata(["gradserve"])])
