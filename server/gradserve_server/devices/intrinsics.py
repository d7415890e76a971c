"""What Numba's language lacks for our kernels: half precision, arrays that do not overlap, counters for threads.

Importing this imports Numba, which takes half a second.

Numba has no arrays of float16 or bfloat16. They are passed as arrays of the integers whose bits they are, int16 for
float16 and uint16 for bfloat16; arithmetic is in float32. For every other dtype arithmetic is in the dtype itself.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.extending import register_jitable

intrinsic: Callable[[Any], Any] = extending.intrinsic
"""Its own annotations give what it returns the signature of what it is applied to."""

FLOAT16_BITS = types.int16
BFLOAT16_BITS = types.uint16

_NUM_PLACES = 6

DONE = 0
"""The counter, in every kernel, of the chunks that are done."""


@intrinsic
def read(typing_context: Any, array: Any, index: Any) -> Any:
    """Returns array[index], widened for arithmetic. For arrays that the kernel may write, too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen(builder, array, builder.load(_address(context, builder, signature, args), align=_align(array)))

    return _widened(array)(array, index), generate


@intrinsic
def write(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`, rounded like `store` does. For arrays that the kernel may `read`, too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = _narrow(context, builder, array, args[2], value)
        builder.store(number, _address(context, builder, signature, args), align=_align(array))
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Returns array[index], widened for arithmetic.

    For arrays that the kernel does not write. Numba does not tell LLVM that arrays do not overlap, so that loops with
    more than a few arrays are not vectorised; `load` says that it reads nothing that `store` has written.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, signature, args), align=_align(array))
        value.set_metadata("noalias", _written(builder))
        return _widen(builder, array, value)

    return _widened(array)(array, index), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`, rounded to the nearest number, ties to even; NaN remains NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = _narrow(context, builder, array, args[2], value)
        stored = builder.store(number, _address(context, builder, signature, args), align=_align(array))
        stored.set_metadata("alias.scope", _written(builder))
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def store_at(typing_context: Any, place: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] to `value`.

    To what `store` promises, that nothing `load` reads is written, this adds that nothing is written by
    stores with different places, literal numbers. Without that LLVM compares all addresses that a loop writes before it
    runs it with vectors.
    """
    if not isinstance(place, types.IntegerLiteral):
        return None  # Numba asks again with the literal

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
        return context.cast(builder, args[1], value, _widened(array))

    return _widened(array)(array, value), generate


@intrinsic
def count_up(typing_context: Any, counters: Any, index: Any) -> Any:
    """Adds one to counters[index], of an int64 array, and returns what it was, atomically among threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature, args)
        return builder.atomic_rmw("add", address, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counters, index), generate


@register_jitable
def wait_for(counters: Any, index: Any, value: Any) -> None:
    """Waits until other threads have counted counters[index] up to `value`. For moments only: it does not sleep."""
    while _read(counters, index) < value:
        _sched_yield()


def wait_until_done(counters: Any, num_chunks: Any) -> None:
    """A kernel: waits until all chunks are done, also those that other threads have taken."""
    wait_for(counters, DONE, num_chunks)


@intrinsic
def _read(typing_context: Any, counters: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, args), "acquire", align=8)

    return types.int64(counters, index), generate


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_I32 = ir.IntType(32)


def _i32(value: int) -> Any:
    return ir.Constant(_I32, value)


def _widened(array: Any) -> Any:
    return types.float32 if array.dtype in (FLOAT16_BITS, BFLOAT16_BITS) else array.dtype


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]], inbounds=True)


def _align(array: Any) -> int:
    return int(array.dtype.bitwidth // 8)


def _widen(builder: Any, array: Any, element: Any) -> Any:
    if array.dtype == FLOAT16_BITS:
        return builder.fpext(builder.bitcast(element, ir.HalfType()), ir.FloatType())
    if array.dtype == BFLOAT16_BITS:
        return builder.bitcast(builder.shl(builder.zext(element, _I32), _i32(16)), ir.FloatType())
    return element


def _narrow(context: Any, builder: Any, array: Any, number: Any, dtype: Any) -> Any:
    number = context.cast(builder, number, dtype, _widened(array))
    if array.dtype == FLOAT16_BITS:
        return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
    return _to_bfloat16(builder, number) if array.dtype == BFLOAT16_BITS else number


def _to_bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _I32)
    odd = builder.and_(builder.lshr(bits, _i32(16)), _i32(1))
    rounded = builder.add(bits, builder.add(odd, _i32(0x7FFF)))
    quiet_nan = builder.or_(bits, _i32(0x400000))  # rounding could carry a NaN on to zero
    bits = builder.select(builder.fcmp_unordered("uno", number, number), quiet_nan, rounded)
    return builder.trunc(builder.lshr(bits, _i32(16)), ir.IntType(16))


def _written(builder: Any) -> Any:
    """The alias scope, in LLVM's sense, of everything that `store` writes."""
    return builder.module.add_metadata([_written_scope(builder)])


def _written_scope(builder: Any) -> Any:
    module = builder.module
    return module.add_metadata(["gradserve: written", module.add_metadata(["gradserve"])])
