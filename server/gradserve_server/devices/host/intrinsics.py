"""Additions to Numba's language for our kernels: half precision, arrays that do not overlap, counters for threads.

Importing this imports Numba, which takes half a second.

Numba has no arrays of float16 or bfloat16. They are passed as arrays of integers with the same bits: int16 for float16
and uint16 for bfloat16. Their arithmetic is in float32; for every other dtype it is in the dtype itself. Processors
that cannot convert float16 (x86-64 before F16C) compute on its bits, because LLVM would call functions of a compiler's
runtime library, which a process may not have.
"""

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.extending import register_jitable

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
        return widen_element(context, builder, array.dtype, value)

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
        return widen_element(context, builder, array.dtype, value)

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
    return narrow_element(context, builder, array.dtype, number)


def _written(builder: Any) -> Any:
    """The alias scope, in LLVM's sense, of everything that `store` writes."""
    return builder.module.add_metadata([_written_scope(builder)])


def _written_scope(builder: Any) -> Any:
    module = builder.module
    return module.add_metadata(["gradserve: written", module.add_metadata(["gradserve"])])


FLOAT16_BITS = types.int16
BFLOAT16_BITS = types.uint16
_I32 = ir.IntType(32)
_FLOAT = ir.FloatType()
_FLOAT16_INFINITY = 0x7C00
_FLOAT16_NAN = 0x7E00
_LEAST_NORMAL = 0x38800000
"""The bits of 2^-14, the least normal float16, as a float32."""
_LEAST_SUBNORMAL = 2.0**-24
_REBIAS = 0x38000000
"""The difference between the exponent biases of float32 and float16, at the exponent's place."""
_PROBE = """
define void @probe(ptr %half, ptr %single) {
  %h = load half, ptr %half
  %wide = fpext half %h to float
  %s = load float, ptr %single
  %narrow = fptrunc float %s to half
  store float %wide, ptr %single
  store half %narrow, ptr %half
  ret void
}
"""


def widened(dtype: Any) -> Any:
    """Returns Numba's type for arithmetic with elements of a type."""
    return types.float32 if dtype in (FLOAT16_BITS, BFLOAT16_BITS) else dtype


def widen_element(context: Any, builder: Any, dtype: Any, element: Any) -> Any:
    """Returns an element, or a vector of elements, in the dtype of arithmetic."""
    if dtype == FLOAT16_BITS:
        if converts_float16(context):
            half = builder.bitcast(element, _as_many(element, ir.HalfType()))
            return builder.fpext(half, _as_many(element, _FLOAT))
        return _from_float16(builder, element)
    if dtype == BFLOAT16_BITS:
        bits = builder.zext(element, _as_many(element, _I32))
        return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _as_many(element, _FLOAT))
    return element


def narrow_element(context: Any, builder: Any, dtype: Any, number: Any) -> Any:
    """Returns a number from arithmetic as an element: the nearest, ties to even; NaN remains NaN."""
    if dtype == FLOAT16_BITS:
        if converts_float16(context):
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        return _to_float16(builder, number)
    return _to_bfloat16(builder, number) if dtype == BFLOAT16_BITS else number


def converts_float16(context: Any) -> bool:
    """True if the processor that `context` compiles for has instructions that convert float16."""
    return _needs_nothing(context.codegen()._tm)


@functools.lru_cache(maxsize=4)
def _needs_nothing(machine: Any) -> bool:
    module = llvm.parse_assembly(_PROBE)
    module.triple = machine.triple
    return not undefined_symbols(machine.emit_object(module))


def _from_float16(builder: Any, element: Any) -> Any:
    bits = builder.zext(element, _as_many(element, _I32))

    def constant(value: int) -> Any:
        return _constant(bits, value)

    magnitude = builder.and_(bits, constant(0x7FFF))
    shifted = builder.shl(magnitude, constant(13))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(_FLOAT16_INFINITY))
    special = builder.or_(shifted, constant(0x7F800000))
    normal = builder.select(is_special, special, builder.add(shifted, constant(_REBIAS)))
    wide = _as_many(bits, _FLOAT)
    unit = ir.Constant(wide, [_LEAST_SUBNORMAL] * _count(bits) if _count(bits) else _LEAST_SUBNORMAL)
    subnormal = builder.bitcast(builder.fmul(builder.sitofp(magnitude, wide), unit), bits.type)
    is_subnormal = builder.icmp_unsigned("<", magnitude, constant(0x400))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(builder.select(is_subnormal, subnormal, normal), sign), wide)


def _to_float16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _I32)
    sign = builder.lshr(builder.and_(bits, _i32(0x80000000)), _i32(16))
    magnitude = builder.and_(bits, _i32(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _i32(13)), _i32(1))
    rounded = builder.add(magnitude, builder.add(odd, _i32(0xFFF)))
    normal = builder.lshr(builder.sub(rounded, _i32(_REBIAS)), _i32(13))
    too_large = builder.icmp_unsigned(">", normal, _i32(_FLOAT16_INFINITY))
    normal = builder.select(too_large, _i32(_FLOAT16_INFINITY), normal)
    # The last digit of 0.5 as float32 is the last digit of a subnormal float16, so adding 0.5 rounds to it.
    half = ir.Constant(_FLOAT, 0.5)
    sum_bits = builder.bitcast(builder.fadd(builder.bitcast(magnitude, _FLOAT), half), _I32)
    subnormal = builder.sub(sum_bits, builder.bitcast(half, _I32))
    is_subnormal = builder.icmp_unsigned("<", magnitude, _i32(_LEAST_NORMAL))
    result = builder.select(is_subnormal, subnormal, normal)
    is_nan = builder.fcmp_unordered("uno", number, number)
    result = builder.select(is_nan, _i32(_FLOAT16_NAN), result)
    return builder.trunc(builder.or_(result, sign), ir.IntType(16))


def _to_bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _I32)
    odd = builder.and_(builder.lshr(bits, _i32(16)), _i32(1))
    rounded = builder.add(bits, builder.add(odd, _i32(0x7FFF)))
    quiet_nan = builder.or_(bits, _i32(0x400000))  # else rounding could carry a NaN over to zero
    bits = builder.select(builder.fcmp_unordered("uno", number, number), quiet_nan, rounded)
    return builder.trunc(builder.lshr(bits, _i32(16)), ir.IntType(16))


def _i32(value: int) -> Any:
    return ir.Constant(_I32, value)


def _count(value: Any) -> int:
    """Returns the number of elements of a vector; 0 for a scalar."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 0


def _as_many(value: Any, element: Any) -> Any:
    """Returns a type with as many elements as a value has."""
    return ir.VectorType(element, _count(value)) if _count(value) else element


def _constant(like: Any, number: int) -> Any:
    return ir.Constant(like.type, [number] * _count(like) if _count(like) else number)


_MAGIC_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SYMTAB = 2
_UNDEFINED = 0


def undefined_symbols(content: bytes) -> set[str]:
    """Returns the names of the symbols that an object file uses and does not define.

    Raises:
        ValueError: It is not a little-endian ELF file of 64 bits.
    """
    if not content.startswith(_MAGIC_64_BIT_LITTLE_ENDIAN):
        raise ValueError("expected a little-endian ELF file of 64 bits")
    sections = list(_sections(content))
    names = set()
    for kind, offset, size, link, entry_size in sections:
        if kind == _SYMTAB:
            strings = sections[link][1]
            for position in range(offset, offset + size, entry_size):
                name, _, _, section = struct.unpack_from("<IBBH", content, position)
                if section == _UNDEFINED and name:
                    start = strings + name
                    names.add(content[start : content.index(b"\0", start)].decode())
    return names


def _sections(content: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the kind, offset, size, link and entry size of each section."""
    (table,) = struct.unpack_from("<Q", content, 0x28)
    header_size, count = struct.unpack_from("<HH", content, 0x3A)
    for position in range(table, table + count * header_size, header_size):
        kind, offset, size, link, entry_size = struct.unpack_from("<4xI16xQQI12xQ", content, position)
        yield kind, offset, size, link, entry_size
