"""The compiler adds nothing to the arithmetic of sums: no flush to zero, no fused operation, no approximation."""

import re

import numpy as np
import pytest

from gradserve_server.devices.cuda.programs import Program
from gradserve_server.devices.cuda.reduction import SumsKey, exact_source, program
from tests.devices.cuda.ptx import ptx_of
from tests.devices.cuda.reduction.one_program import all_kernels

_LOOSE = re.compile(r"^\s*[\w.]*(?:\.ftz|\bfma|\bmad\.[^;\n]*\.f\d\d|\.approx|\.full)[\w.]*\s", re.MULTILINE)
"""Instructions that flush subnormal numbers, do not round products, or round quotients otherwise."""


@pytest.mark.exhaustive
def test_every_operation_is_rounded_by_itself() -> None:
    ptx = ptx_of(all_kernels())
    assert all(ptx.count(f"{operation}.rn.f{bits}") for operation in ("mul", "add", "div") for bits in (32, 64))
    assert _LOOSE.findall(ptx) == []
    floating = set(re.findall(r"^\s*((?:mul|add|sub|div)\.[\w.]*f(?:16|32|64))\s", ptx, re.MULTILINE))
    assert floating == {f"{operation}.rn.f{bits}" for operation in ("mul", "add", "div") for bits in (32, 64)}


PLAIN = """
__device__ __forceinline__ float product(float x, float y) { return x * y; }
__device__ __forceinline__ float sum(float x, float y) { return x + y; }
__device__ __forceinline__ float quotient(float x, float y) { return x / y; }
__device__ __forceinline__ double product(double x, double y) { return x * y; }
__device__ __forceinline__ double sum(double x, double y) { return x + y; }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ double as_double(float value) { return value; }
__device__ __forceinline__ float as_float(double value) { return value; }
"""
"""The same in CUDA C++."""


def test_plain_arithmetic_would_be_changed() -> None:
    keys = [SumsKey(np.dtype(np.float32), np.dtype(total)) for total in (np.float32, np.float64)]
    programs = [program(key) for key in keys]
    plain = [Program(each.name, each.source.replace(exact_source(), PLAIN), each.kernels) for each in programs]
    loose = {found.strip() for each in plain for found in _LOOSE.findall(ptx_of(each))}
    assert loose >= {"fma.rn.ftz.f32", "fma.rn.f64", "div.rn.ftz.f32", "cvt.rn.ftz.f32.f64"}
