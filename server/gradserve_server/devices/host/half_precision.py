"""float16 and bfloat16 in LLVM's code. Importing this imports Numba, which takes half a second.

Processors that cannot convert float16 (x86-64 before F16C) compute on its bits. LLVM would call functions of a
compiler's runtime library, which a process may not have.
"""

import functools
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from gradserve_server.devices.host.object_file import undefined_symbols

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


def widen(context: Any, builder: Any, dtype: Any, element: Any) -> Any:
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


def narrow(context: Any, builder: Any, dtype: Any, number: Any) -> Any:
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
