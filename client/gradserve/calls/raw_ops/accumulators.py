"""The ops of conditional accumulators.

TensorFlow has each dense op twice, for references and for resources; here both do the same. Sparse ops are there once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradserve.calls.accumulators.cache import AccumulatorCache
from gradserve.calls.accumulators.components import Components, ComponentSpec
from gradserve.calls.accumulators.contributions import Contribution
from gradserve.calls.accumulators.creation import AccumulatorOptions
from gradserve.calls.accumulators.operations import handle_of
from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.arguments import as_op_input
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.raw_ops.accumulator_arguments import (
    AccumulatorLike,
    accumulator_dtype,
    as_handle,
    check_apply_signature,
    check_reduction,
    check_take_signature,
    int64_array,
    op_name,
    optional_text,
    scalar,
)
from gradserve.conversion.plain import as_flag, is_bool
from gradserve.conversion.tensors import as_array_or_numbers
from gradserve.results import (
    AccumulatorHandle,
    AccumulatorKind,
    ArrayLike,
    Average,
    DenseSpec,
    DTypeLike,
    IndexedSlices,
    Shape,
    SparseAccumulatorTakeGradientOutputs,
    SparseSpec,
    TensorHandle,
    TensorLike,
)
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.errors import InvalidArgumentError, NotFoundError

_REFERENCE, _RESOURCE = "string_ref", "resource"
_APPLY_INPUTS = ("string_ref", "int64", "int64", "{}", "int64")
_TAKE_INPUTS, _TAKE_OUTPUTS = ("string_ref", "int32"), ("int64", "{}", "int64")
_FIELDS = {
    "sparse.indices": "gradient_indices",
    "sparse.values": "gradient_values",
    "sparse.dense_shape": "gradient_shape",
}
"""The arguments that become parts of a request."""


class AccumulatorOpsBase:
    """The base class of the accumulator ops."""

    def __init__(self, ids: RequestIds, timeout: float, made: AccumulatorCache) -> None:
        """Takes the state of the client.

        Args:
            ids: Its request ids.
            timeout: Its default timeout in seconds, for calls that wait.
            made: Its accumulators.
        """
        self._ids = ids
        self._timeout = timeout
        self._made = made

    def _create(
        self,
        spec: ComponentSpec,
        container: str | None,
        shared_name: str | None,
        reduction_type: str | None,
        name: str,
    ) -> Operation[AccumulatorHandle]:
        reduction = optional_text(reduction_type, "reduction_type", "MEAN")
        check_reduction(reduction)
        own_name = optional_text(shared_name, "shared_name") or None
        options = AccumulatorOptions(reduction, optional_text(container, "container"))
        return handle_of((yield from self._made.create(name, own_name, Components.of_one_tensor(spec), options)))

    def _wire(self, handle: AccumulatorHandle) -> AccumulatorWire:
        return self._made.wire_of(handle)

    def _take(
        self, handle: AccumulatorHandle, num_required: ArrayLike, timeout: float | None, request_id: int | None
    ) -> Operation[Average]:
        wait = self._timeout if timeout is None else check_timeout(timeout)
        return self._wire(handle).take(scalar(num_required, np.int32, "num_required"), wait, request_id)


class AccumulatorOps(AccumulatorOpsBase):
    """The ops of dense accumulators, and the ops that apply to sparse ones too."""

    def ConditionalAccumulator(
        self,
        *,
        dtype: DTypeLike,
        shape: Shape | None,
        container: str | None = "",
        shared_name: str | None = "",
        reduction_type: str | None = "MEAN",
        name: str | None = None,
    ) -> Operation[AccumulatorHandle]:
        """Creates an accumulator of dense gradients, or finds the one with this shared name.

        `Client.conditional_accumulator` makes the same accumulators, with more options.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: The shape of every gradient; None is an unknown dimension, or an unknown shape. () is a scalar.
            container: The namespace of the shared name; empty for the default one.
            shared_name: The name by which other clients find it. Empty: it is private, and deleted with this client.
            reduction_type: "MEAN" or "SUM".
            name: The prefix of a private accumulator's name in lists; None for the name of the op.

        Returns:
            The handle of the accumulator, which other clients can use, too.

        Raises:
            InvalidArgumentError: An argument is not valid.
            AlreadyExistsError: The name is taken by an accumulator with other properties; the message says which.
                TensorFlow would share that one.
        """
        return (
            yield from self._create(
                _dense(dtype, shape), container, shared_name, reduction_type, op_name(name, "ConditionalAccumulator")
            )
        )

    def ResourceConditionalAccumulator(
        self,
        *,
        dtype: DTypeLike,
        shape: Shape | None,
        container: str | None = "",
        shared_name: str | None = "",
        reduction_type: str | None = "MEAN",
        name: str | None = None,
    ) -> Operation[AccumulatorHandle]:
        """Creates an accumulator of dense gradients, or finds the one with this shared name: ConditionalAccumulator."""
        return (
            yield from self._create(
                _dense(dtype, shape),
                container,
                shared_name,
                reduction_type,
                op_name(name, "ResourceConditionalAccumulator"),
            )
        )

    def AccumulatorApplyGradient(
        self,
        *,
        handle: AccumulatorLike,
        local_step: ArrayLike,
        gradient: TensorLike,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> Operation[None]:
        """Adds a gradient to the round, or drops it if `local_step` is smaller than the accumulator's step.

        Never waits for other workers. Every call counts once, even if the client has to send it again.
        Use `ConditionalAccumulator.apply_grad` to know whether the gradient was dropped.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            local_step: The step at which the gradient was computed: int64, a scalar.
            gradient: The gradient, of the accumulator's dtype and shape, or the handle of such a tensor on the server,
                which stays there.
            worker_id: The sender's id, for diagnoses; needed by accumulators that are deterministic or count a worker
                once. Empty: no id, so that every call counts, as in TensorFlow.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        return self._apply(_REFERENCE, handle, local_step, gradient, worker_id, request_id)

    def ResourceAccumulatorApplyGradient(
        self,
        *,
        handle: AccumulatorLike,
        local_step: ArrayLike,
        gradient: TensorLike,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> Operation[None]:
        """Adds a gradient to the round, or drops it: AccumulatorApplyGradient."""
        return self._apply(_RESOURCE, handle, local_step, gradient, worker_id, request_id)

    def AccumulatorTakeGradient(
        self,
        *,
        handle: AccumulatorLike,
        num_required: ArrayLike,
        dtype: DTypeLike,
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> Operation[NDArray[Any]]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out.

        Args:
            handle: The handle of a dense accumulator, or the accumulator itself.
            num_required: The number of gradients to wait for: int32, a scalar, at least 1.
            dtype: The accumulator's dtype.
            timeout: Seconds to wait; None for the client's timeout, math.inf for no limit.
            request_id: The `request_id` of a failed attempt's error, to get the same average.

        Returns:
            The mean or sum of the gradients, of their shape and of `dtype`.

        Raises:
            InvalidArgumentError: `num_required` is not positive, `dtype` is not the accumulator's, or `handle` is not
                valid.
            DeadlineExceededError: There were too few gradients in time. The message says how many, and from whom.
            AbortedError: The accumulator was deleted while the call waited.
        """
        return self._take_dense(_REFERENCE, handle, num_required, dtype, timeout, request_id)

    def ResourceAccumulatorTakeGradient(
        self,
        *,
        handle: AccumulatorLike,
        num_required: ArrayLike,
        dtype: DTypeLike,
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> Operation[NDArray[Any]]:
        """Waits for `num_required` gradients and returns their average: AccumulatorTakeGradient."""
        return self._take_dense(_RESOURCE, handle, num_required, dtype, timeout, request_id)

    def AccumulatorNumAccumulated(self, *, handle: AccumulatorLike) -> Operation[np.int32]:
        """Returns the number of gradients accepted since the last take.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.

        Returns:
            The number: int32, a scalar.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return np.int32((yield from self._wire(as_handle(handle)).num_accumulated()))

    def ResourceAccumulatorNumAccumulated(self, *, handle: AccumulatorLike) -> Operation[np.int32]:
        """Returns the number of gradients accepted since the last take: AccumulatorNumAccumulated."""
        return np.int32((yield from self._wire(as_handle(handle)).num_accumulated()))

    def AccumulatorSetGlobalStep(self, *, handle: AccumulatorLike, new_global_step: ArrayLike) -> Operation[None]:
        """Sets the accumulator's step, also to a smaller one. Gradients in the round stay in it.

        Args:
            handle: The handle of a dense or sparse accumulator, or the accumulator itself.
            new_global_step: The new step: int64, a scalar.

        Raises:
            InvalidArgumentError: The step is not valid.
            NotFoundError: The accumulator was deleted.
        """
        return self._set_global_step(handle, new_global_step)

    def ResourceAccumulatorSetGlobalStep(
        self, *, handle: AccumulatorLike, new_global_step: ArrayLike
    ) -> Operation[None]:
        """Sets the step: AccumulatorSetGlobalStep."""
        return self._set_global_step(handle, new_global_step)

    def DestroyResourceOp(
        self, *, resource: AccumulatorLike, ignore_lookup_error: bool | None = True
    ) -> Operation[None]:
        """Deletes an accumulator; calls that wait on it end with AbortedError.

        Args:
            resource: The handle of a dense or sparse accumulator, or the accumulator itself.
            ignore_lookup_error: Whether to ignore that the accumulator does not exist.

        Raises:
            NotFoundError: The accumulator does not exist.
        """
        handle = as_handle(resource, field="resource")
        is_ignored = ignore_lookup_error is None or as_flag(ignore_lookup_error, Argument("ignore_lookup_error"))
        deleted = yield from self._wire(handle).delete()
        if not deleted and not is_ignored:
            raise NotFoundError(
                f"no accumulator '{handle.container}/{handle.name}'", field="resource", code="GS_NO_SUCH_NAME"
            )

    def _apply(
        self,
        reference: str,
        accumulator: AccumulatorLike,
        local_step: ArrayLike,
        gradient: TensorLike,
        worker_id: str,
        request_id: int | None,
    ) -> Operation[None]:
        handle = as_handle(accumulator, AccumulatorKind.DENSE)
        value = as_op_input(gradient, handle.dtype, "gradient")
        check_apply_signature((reference, "int64", "{}"), value.dtype, handle, "gradient")
        contribution = Contribution(scalar(local_step, np.int64, "local_step"), 1.0, worker_id)
        yield from self._wire(handle).apply({"": value}, contribution, request_id)

    def _take_dense(
        self,
        reference: str,
        accumulator: AccumulatorLike,
        num_required: ArrayLike,
        dtype: DTypeLike,
        timeout: float | None,
        request_id: int | None,
    ) -> Operation[NDArray[Any]]:
        handle = as_handle(accumulator, AccumulatorKind.DENSE)
        check_take_signature((reference, "int32"), ("{}",), dtype, handle)
        average = yield from self._take(handle, num_required, timeout, request_id)
        taken: NDArray[Any] = average[""]
        return taken

    def _set_global_step(self, handle: AccumulatorLike, new_global_step: ArrayLike) -> Operation[None]:
        return self._wire(as_handle(handle)).set_global_step(scalar(new_global_step, np.int64, "new_global_step"))


def _dense(dtype: DTypeLike, shape: Shape | None) -> DenseSpec:
    return DenseSpec(accumulator_dtype(dtype), shape)


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
