"""The ops of sparse conditional accumulators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from gradserve.calls.accumulators.wire import Contribution
from gradserve.calls.exchange import Operation
from gradserve.calls.raw_ops.accumulator_arguments import (
    AccumulatorLike,
    accumulator_dtype,
    as_handle,
    check_apply_signature,
    check_take_signature,
    int64_array,
    op_name,
    scalar,
)
from gradserve.calls.raw_ops.accumulators import AccumulatorOpsBase
from gradserve.conversion.plain import is_bool
from gradserve.conversion.tensors import as_array_or_numbers
from gradserve.results import (
    AccumulatorHandle,
    AccumulatorKind,
    ArrayLike,
    DTypeLike,
    IndexedSlices,
    Shape,
    SparseAccumulatorTakeGradientOutputs,
    SparseSpec,
    TensorHandle,
)
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import InvalidArgumentError

_APPLY_INPUTS = ("string_ref", "int64", "int64", "{}", "int64")
_TAKE_INPUTS, _TAKE_OUTPUTS = ("string_ref", "int32"), ("int64", "{}", "int64")
_FIELDS = {
    "sparse.indices": "gradient_indices",
    "sparse.values": "gradient_values",
    "sparse.dense_shape": "gradient_shape",
}
"""The arguments that become parts of a request."""


class SparseAccumulatorOps(AccumulatorOpsBase):
    """The ops of sparse accumulators alone."""

    def SparseConditionalAccumulator(
        self,
        *,
        dtype: DTypeLike,
        shape: Shape | None,
        container: str | None = "",
        shared_name: str | None = "",
        reduction_type: str | None = "MEAN",
        name: str | None = None,
    ) -> Operation[AccumulatorHandle]:
        """Creates an accumulator of sparse gradients, or finds the one with this shared name.

        `Client.sparse_conditional_accumulator` makes the same accumulators, with more options.

        Args:
            shape: The shape of the whole tensor; None is an unknown dimension, or an unknown shape.
        """
        spec = SparseSpec(accumulator_dtype(dtype), shape)
        return (
            yield from self._create(
                spec, container, shared_name, reduction_type, op_name(name, "SparseConditionalAccumulator")
            )
        )

    def SparseAccumulatorApplyGradient(
        self,
        *,
        handle: AccumulatorLike,
        local_step: ArrayLike,
        gradient_indices: ArrayLike,
        gradient_values: ArrayLike,
        gradient_shape: ArrayLike,
        has_known_shape: bool,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> Operation[None]:
        """Adds rows to the round, as AccumulatorApplyGradient adds a dense gradient.

        Args:
            handle: The handle of a sparse accumulator, or the accumulator itself.
            local_step: The step at which the gradient was computed: int64, a scalar.
            gradient_indices: The numbers of the rows: int64, shape [n]. Ascending lists merge fastest; equal indices in
                unsorted lists may stay separate rows.
            gradient_values: The rows: the accumulator's dtype, shape [n, ...].
            gradient_shape: The shape of the whole tensor, checked against the accumulator's: int64, a vector.
            has_known_shape: Whether gradient_shape counts; otherwise it is not read.
            worker_id: The sender's id; see `AccumulatorApplyGradient`.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        accumulator = as_handle(handle, AccumulatorKind.SPARSE)
        for name, given in (("gradient_indices", gradient_indices), ("gradient_values", gradient_values)):
            if isinstance(given, TensorHandle):
                raise InvalidArgumentError(f"expected an array for {name}, got a TensorHandle", field=name)
        values = as_array_or_numbers(gradient_values, accumulator.dtype, Argument("gradient_values"))
        check_apply_signature(_APPLY_INPUTS, values.dtype, accumulator, "gradient_values")
        if not is_bool(has_known_shape):
            raise InvalidArgumentError(
                f"Expected bool for argument 'has_known_shape' not {described(has_known_shape)}.",
                field="has_known_shape",
            )
        shape = tuple(int64_array(gradient_shape, "gradient_shape").ravel().tolist()) if has_known_shape else None
        slices = IndexedSlices(values, int64_array(gradient_indices, "gradient_indices"), shape)
        contribution = Contribution(scalar(local_step, np.int64, "local_step"), 1.0, worker_id)
        with _errors_of_arguments():
            yield from self._wire(accumulator).apply({"": slices}, contribution, request_id)

    def SparseAccumulatorTakeGradient(
        self,
        *,
        handle: AccumulatorLike,
        num_required: ArrayLike,
        dtype: DTypeLike,
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> Operation[SparseAccumulatorTakeGradientOutputs]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out. A mean divides each row by the number of gradients that have this row.

        Args:
            handle: The handle of a sparse accumulator, or the accumulator itself.

        Returns:
            indices: int64, shape [n]: the numbers of the rows.
            values: `dtype`, shape [n, ...]: the rows.
            shape: int64, a vector: the shape of the whole tensor, -1 where unknown.
        """
        accumulator = as_handle(handle, AccumulatorKind.SPARSE)
        check_take_signature(_TAKE_INPUTS, _TAKE_OUTPUTS, dtype, accumulator)
        average = yield from self._take(accumulator, num_required, timeout, request_id)
        taken = cast(IndexedSlices, average[""])
        return SparseAccumulatorTakeGradientOutputs(
            taken.indices, taken.values, np.asarray(taken.dense_shape, np.int64)
        )


@contextmanager
def _errors_of_arguments() -> Iterator[None]:
    """Names the argument in errors about parts of a request."""
    try:
        yield
    except InvalidArgumentError as error:
        for part, argument in _FIELDS.items():
            if error.field is not None and part in error.field:
                error.field = argument
        raise
