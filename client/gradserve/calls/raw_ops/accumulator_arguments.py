"""Checks of the arguments of accumulator ops, with TensorFlow's messages where it has them."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradserve.calls.accumulators.operations import HasAccumulatorRef
from gradserve.calls.arguments import check_attribute, check_text_attribute, dtype_text, shape_text
from gradserve.conversion.arrays import as_array, as_dtype
from gradserve.conversion.plain import as_text, is_text
from gradserve.results import AccumulatorHandle, AccumulatorKind, ArrayLike, DTypeLike
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.arrays import BFLOAT16, Array, DType
from gradserve_protocol.errors import InvalidArgumentError

AccumulatorLike: TypeAlias = AccumulatorHandle | HasAccumulatorRef
"""The handle of an accumulator, or an accumulator that has one."""
_FLOATING = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
DOC = "name: Has no effect: TensorFlow's name of a node."
_END_OF_ARGUMENTS = re.compile(r"\n\n(?=(Returns|Raises):\n)")


def as_handle(
    value: AccumulatorLike, kind: AccumulatorKind | None = None, *, field: str = "handle"
) -> AccumulatorHandle:
    """Returns the handle of an accumulator.

    Args:
        value: The handle, or the accumulator.
        kind: The required kind; None for either.
        field: The field of the error.

    Raises:
        InvalidArgumentError: It is something else.
    """
    handle = value if isinstance(value, AccumulatorHandle) else getattr(value, "accumulator_ref", None)
    if not isinstance(handle, AccumulatorHandle):
        raise InvalidArgumentError(
            "expected an AccumulatorHandle, a ConditionalAccumulator or a SparseConditionalAccumulator, "
            f"got {type(value).__name__}",
            field=field,
        )
    names = (handle.container, handle.name, handle.incarnation)
    if not (all(map(is_text, names)) and isinstance(handle.kind, AccumulatorKind)):
        raise InvalidArgumentError("expected an AccumulatorHandle returned by a client, got another one", field=field)
    if kind not in (None, handle.kind):
        raise InvalidArgumentError(
            f"expected a {kind.value.lower()} accumulator, got the {handle.kind.value.lower()} "
            f"'{handle.container}/{handle.name}'",
            field=field,
        )
    return handle


def accumulator_dtype(dtype: DTypeLike) -> DType:
    """Returns the dtype of a new accumulator.

    Raises:
        InvalidArgumentError: Accumulators cannot have this dtype.
    """
    known = _known_dtype(dtype)
    check_attribute(dtype_text(known), "dtype", [dtype_text(each) for each in _FLOATING])
    return known


def check_reduction(reduction_type: str) -> None:
    """Checks the reduction type.

    Raises:
        InvalidArgumentError: It is neither "MEAN" nor "SUM".
    """
    check_text_attribute(reduction_type, "reduction_type", ("MEAN", "SUM"))


def check_apply_signature(inputs: Sequence[str], dtype: DType, handle: AccumulatorHandle, field: str) -> None:
    """Checks the dtype of a gradient.

    Args:
        inputs: The types of the op's inputs, as TensorFlow writes them, with "{}" for the gradient's.
        dtype: The dtype of the gradient.
        handle: The handle of the accumulator.
        field: The field of the error.

    Raises:
        InvalidArgumentError: The dtype is not the accumulator's.
    """
    _check_signature(f"{', '.join(inputs)}->", dtype, handle, field)


def check_take_signature(
    inputs: Sequence[str], outputs: Sequence[str], dtype: DTypeLike, handle: AccumulatorHandle
) -> None:
    """Checks the `dtype` of a take op; see `check_apply_signature`.

    Raises:
        InvalidArgumentError: The dtype is not the accumulator's.
    """
    _check_signature(f"{', '.join(inputs)}->{', '.join(outputs)}", _known_dtype(dtype), handle, "dtype")


def op_name(name: str | None, default: str) -> str:
    """Returns the name of an op: the default if it is None or empty.

    Raises:
        InvalidArgumentError: It is not text.
    """
    return default if name is None else as_text(name, Argument("name")) or default


def optional_text(value: str | None, name: str, default: str = "") -> str:
    """Returns a text; a default for None, as TensorFlow's wrappers do.

    Raises:
        InvalidArgumentError: It is not text.
    """
    return default if value is None else as_text(value, Argument(name))


def scalar(value: ArrayLike, dtype: DTypeLike, name: str) -> int:
    """Returns the value of a scalar input of an integer dtype.

    Raises:
        InvalidArgumentError: It is not a scalar, not an integer, or too large.
    """
    array = _integers(value, dtype, name)
    if array.ndim:
        raise InvalidArgumentError(
            f"Argument {name} must be scalar, but had bad shape {shape_text(array.shape)}", field=name
        )
    return int(array)


def int64_array(value: ArrayLike, name: str) -> Array:
    """Returns an input of integers as int64.

    Raises:
        InvalidArgumentError: Some values are not integers, or too large.
    """
    return _integers(value, np.int64, name)


def _integers(value: ArrayLike, dtype: DTypeLike, name: str) -> Array:
    wanted = np.dtype(dtype)
    try:
        array = as_array(value, Argument(name))
    except InvalidArgumentError:
        raise InvalidArgumentError(f"expected {wanted} values for {name}, got {described(value)}", field=name) from None
    if array.size == 0:
        return np.empty(array.shape, wanted)
    limits = np.iinfo(wanted)
    if array.dtype.kind not in "iub" or int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise InvalidArgumentError(f"expected {wanted} values for {name}, got {described(value)}", field=name)
    return array.astype(wanted)


def _known_dtype(dtype: DTypeLike) -> DType:
    return as_dtype(dtype, Argument("dtype"))


def _check_signature(signature: str, dtype: DType, handle: AccumulatorHandle, field: str) -> None:
    if dtype != handle.dtype:
        have, expected = (signature.format(dtype_text(each)) for each in (dtype, handle.dtype))
        raise InvalidArgumentError(f"Signature mismatch, have: {have} expected: {expected}", field=field)


def accept_names(ops: type) -> None:
    """Lets ops without an argument `name` take one."""
    for op_name, op in inspect.getmembers(ops, inspect.isfunction):
        if op_name[0].isupper() and "name" not in inspect.signature(op).parameters:
            setattr(ops, op_name, _with_name(op))


def _with_name(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def method(self: object, /, *positional: Any, name: str | None = None, **given: Any) -> Any:
        optional_text(name, "name")
        return op(self, *positional, **given)

    signature = inspect.signature(op)
    parameter = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation="str | None", default=None)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), parameter]
    )
    method.__annotations__ = {**op.__annotations__, "name": "str | None"}
    method.__doc__ = _END_OF_ARGUMENTS.sub(f"\n    {DOC}\n\n", inspect.getdoc(op) or "", count=1)
    return method
