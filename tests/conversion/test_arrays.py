"""What is an array to the client, and what is not."""

import array
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
from gradserve.conversion.arrays import as_array, as_dtype, has_dtype
from gradserve.conversion.tensors import as_array_of, as_array_or_numbers
from gradserve_protocol.argument import Argument
from tests.conversion.stand_ins import CopyingFromGpu, DType, Exporting, OnGpu, Tensor, dtype, float8, jax_bfloat16

W = Argument("component 'w'", "gradient")
F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
BF16 = np.dtype(ml_dtypes.bfloat16)
I32 = np.dtype("i4")


# --- Arrays

READ: dict[str, tuple[Any, Any, str]] = {
    "integer": (3, 3, "int64"),
    "boolean": (True, True, "bool"),
    "float": (1.5, 1.5, "float64"),
    "complex": (1j, 1j, "complex128"),
    "NumPy scalar": (np.float16(1.5), 1.5, "float16"),
    "list of integers": ([1, 2], [1, 2], "int64"),
    "mixed numbers": ([1, 2.5, True], [1, 2.5, 1], "float64"),
    "nested lists and tuples": ([(1, 2), [3, 4]], [[1, 2], [3, 4]], "int64"),
    "empty list": ([], [], "float64"),
    "empty rows": ([[], []], [[], []], "float64"),
    "range": (range(3), [0, 1, 2], "int64"),
    "integers of 64 bits": ([2**63], [2**63], "uint64"),
    "integers beyond 64 bits": ([1, 2**100], [1, 2.0**100], "float64"),
    "array": (np.ones((2, 3), np.float16), np.ones((2, 3)), "float16"),
    "list of arrays": ([np.ones(2, np.float32), np.zeros(2, np.float32)], [[1, 1], [0, 0]], "float32"),
    "big-endian": (np.array([1, 2], ">f4"), [1, 2], "float32"),
    "transposed": (np.arange(6).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]], "int64"),
    "array of another module": (array.array("f", [1, 2]), [1, 2], "float32"),
    "memory": (np.ones(2).data, [1, 1], "float64"),
    "bfloat16": (np.ones(2, ml_dtypes.bfloat16), [1, 1], "bfloat16"),
    "tensor": (Tensor([1, 2]), [1, 2], "float32"),
    "tensor that requires a gradient": (Tensor([1, 2], requires_grad=True), [1, 2], "float32"),
    "tensor of bfloat16": (Tensor([1, 2.5], "bfloat16"), [1, 2.5], "bfloat16"),
    "tensor of bfloat16 that requires a gradient": (
        Tensor([1, 2.5], "bfloat16", requires_grad=True),
        [1, 2.5],
        "bfloat16",
    ),
    "list of tensors": ([Tensor([1, 2], requires_grad=True), Tensor([3, 4])], [[1, 2], [3, 4]], "float32"),
    "tensors and numbers": ([Tensor(1.5), 2.5], [1.5, 2.5], "float64"),
    "DLPack alone": (Exporting([[1, 2], [3, 4]]), [[1, 2], [3, 4]], "int64"),
    "GPU, copied by its library": (CopyingFromGpu([1.0, 2.0]), [1, 2], "float64"),
}


@pytest.mark.parametrize(("value", "expected", "name"), READ.values(), ids=READ)
def test_what_is_an_array(value: Any, expected: list[Any], name: str) -> None:
    read = as_array(value, W)
    assert read.dtype.name == name
    assert read.dtype.isnative
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(np.asarray(read, np.complex128), np.asarray(expected, np.complex128))


def test_what_is_ready_is_not_copied() -> None:
    ready = np.ones((2, 3), np.float32)
    assert np.shares_memory(as_array(ready, W), ready)
    for tensor in (Tensor(ready, requires_grad=True), Exporting(ready)):
        assert np.shares_memory(as_array(tensor, W), tensor._values)


def test_a_tensor_that_requires_a_gradient_is_detached_once() -> None:
    tensor = Tensor([1.0], requires_grad=True)
    as_array(tensor, W)
    assert tensor.num_detached == 1


MASKED = np.ma.MaskedArray([1.0, 2.0], [False, True])


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Failing:
    """Raises what nobody expects."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self._error


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "expected an array or numbers for component 'w', got None"),
    "nothing in a list": ([1.0, None], "expected an array or numbers for component 'w', got None"),
    "text": ("abc", "expected an array or numbers for component 'w', got 'abc'"),
    "bytes": (b"abc", "expected an array or numbers for component 'w', got b'abc'"),
    "a list of text": (["1", "2"], "expected an array or numbers for component 'w', got '1'"),
    "a dict": ({"a": 1}, "expected an array or numbers for component 'w', got {'a': 1}"),
    "a set": ({1}, "expected an array or numbers for component 'w', got {1}"),
    "an object": (object(), "expected an array or numbers for component 'w', got object"),
    "a type": (int, "expected an array or numbers for component 'w', got int"),
    "an array of objects": (np.array([None, object()]), "expected a dtype out of float16"),
    "an array of text": (np.array(["a"]), "got <U1"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "got datetime64[D]"),
    "a structured array": (np.zeros(2, "f4,f4"), "for component 'w', got [('f0', '<f4'), ('f1', '<f4')]"),
    "rows of different lengths": (
        [[1, 2], [3]],
        "expected an array or numbers for component 'w', got rows of different",
    ),
    "a number and a row": ([1, [2]], "got rows of different lengths"),
    "an integer beyond float64": (10**400, "expected numbers that fit into a float64 for component 'w', got 1000"),
    "too deep": (deep(66), "expected lists in at most 64 levels for component 'w', got more"),
    "endless": (endless(), "expected lists in at most 64 levels"),
    "masked": (MASKED, "expected an array or numbers for component 'w', got a masked array; .filled() replaces"),
    "masked in a list": ([MASKED, MASKED], "got a masked array"),
    "masked, nothing hidden": (np.ma.MaskedArray([1.0]), "got a masked array"),
    "the masked constant": (np.ma.masked, "got a masked array"),
    "float8": (np.zeros(2, ml_dtypes.float8_e4m3fn), "for component 'w', got float8_e4m3fn"),
    "float8 by DLPack": (
        float8(),
        "expected an array or numbers for component 'w', got Exporting, which cannot be read",
    ),
    "a tensor of a GPU": (
        OnGpu(),
        "expected an array in the memory of the host for component 'w', got OnGpu on cuda:0; copy it first, for "
        "example with .cpu(): can't convert cuda:0",
    ),
    "a library's error": (Failing(KeyError("tracer")), "got Failing, which cannot be read: 'tracer'"),
}
_OF_FLOAT8 = Tensor([1])
_OF_FLOAT8.dtype = dtype("float8_e4m3fn")
REFUSED["a tensor of float8"] = (_OF_FLOAT8, "complex128 for component 'w', got torch.float8_e4m3fn")


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_array(value: Any, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)) as raised:
        as_array(value, W)
    assert raised.value.field == "gradient"


def test_running_out_of_memory_is_no_fault_of_the_argument() -> None:
    with pytest.raises(MemoryError):
        as_array(Failing(MemoryError()), W)


# --- Values in a dtype

FITS: list[tuple[Any, Any, list[Any]]] = [
    ([1, 2], F32, [1, 2]),
    ([True, False], F16, [1, 0]),
    (np.array([1.5, 2.5]), F32, [1.5, 2.5]),
    (np.array([3.4e38]), F32, [np.float32(3.4e38)]),
    ([np.inf, -np.inf, np.nan], F16, [np.inf, -np.inf, np.nan]),
    ([65504, 65519], F16, [65504, 65504]),
    ([1e-300], F32, [0]),
    ([2**100], F32, [2.0**100]),
    ([2**127], BF16, [2.0**127]),
    (np.array([1.0], ml_dtypes.bfloat16), F16, [1]),
    (Tensor([1, 2], "bfloat16", requires_grad=True), F32, [1, 2]),
    ([3.0], I32, [3]),
    ([], I32, []),
    (np.array([5], np.uint64), I32, [5]),
]


@pytest.mark.parametrize(("value", "dtype", "expected"), FITS)
def test_values_that_fit(value: Any, dtype: np.dtype[Any], expected: list[Any]) -> None:
    cast = as_array_of(dtype, value, W)
    assert cast.dtype == dtype
    np.testing.assert_array_equal(cast.astype(np.float64), np.asarray(expected, np.float64))


BEYOND: list[tuple[Any, Any, str]] = [
    ([0.0, 1e300], F32, "of float32 for component 'w', got 1e+300 at [1], which does not fit into float32"),
    (-1e300, F32, "got -1e+300, which does not fit"),
    ([[1, 2], [3, 70000]], F16, "got 70000 at [1, 1], which does not fit into float16"),
    (np.array([65535], np.uint16), F16, "got 65535 at [0]"),
    (np.array([65520], np.float32), F16, "got 65520 at [0]"),
    (np.array([3.4e38], np.float32), BF16, "got 3.4e+38 at [0]"),
    ([1e300], BF16, "got 1e+300 at [0]"),
    (np.array([1e10], ml_dtypes.bfloat16), F16, "which does not fit into float16"),
    ([np.inf, 1e300], F32, "got 1e+300 at [1]"),
    (Tensor([1e300], "float64", requires_grad=True), F32, "got 1e+300 at [0]"),
    ([1.5], I32, "got 1.5 at [0], which does not fit into int32"),
    ([2**40], I32, "got 1099511627776 at [0]"),
    ([np.nan], I32, "got nan at [0]"),
    ([1j], F32, "expected real numbers for component 'w', got an array of complex128"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "dtype", "message"), BEYOND)
def test_values_that_do_not_fit(value: Any, dtype: np.dtype[Any], message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)):
        as_array_of(dtype, value, W)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "float32"),
        ([1, 2.5], "float32"),
        ([Tensor([1], "float64")], "float32"),
        (np.float64(1), "float64"),
        (np.ones(2, np.int8), "int8"),
        (Tensor([1], "float64"), "float64"),
        (Exporting([1.0]), "float64"),
    ],
)
def test_numbers_get_the_default_dtype(value: Any, expected: str) -> None:
    assert has_dtype(value) == (expected != "float32")
    assert as_array_or_numbers(value, F32, W).dtype.name == expected


# --- Dtypes

DTYPES: list[tuple[Any, str]] = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("f8", "float64"),
    (">f4", "float32"),
    (float, "float64"),
    (np.float16, "float16"),
    (np.dtype(">i4"), "int32"),
    (ml_dtypes.bfloat16, "bfloat16"),
    (dtype("float32"), "float32"),
    (dtype("bfloat16"), "bfloat16"),
    (DType("float64"), "float64"),
    (DType("bfloat16"), "bfloat16"),
    (jax_bfloat16, "bfloat16"),
    ("torch.float32", "float32"),
]


@pytest.mark.parametrize(("given", "name"), DTYPES, ids=str)
def test_dtypes_by_any_name(given: Any, name: str) -> None:
    assert as_dtype(given, W).name == name


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None"),
        (3, "3"),
        ("2", "2"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        (dtype("float8_e4m3fn"), "torch.float8_e4m3fn"),
        (dtype("qint8"), "torch.qint8"),
        (DType("string"), "string"),
        (object, "object"),
        (np.ones(2), "ndarray"),
        ([("a", "f4")], "[('a', 'f4')]"),
        ("f4,f4", "f4,f4"),
        (Tensor([1]), "Tensor"),
    ],
)
def test_what_is_no_dtype_of_a_tensor(given: Any, shown: str) -> None:
    found = rf"for component 'w', got {re.escape(shown)} \[GS_INVALID_ARGUMENT\]$"
    expected = rf"expected a dtype out of float16, .*, complex128 {found}"
    with pytest.raises(gradserve.InvalidArgumentError, match=expected):
        as_dtype(given, W)
