"""The ops of conditional accumulators.

TensorFlow has dense accumulators twice, as references and as resources; here both are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.array_like import ArrayLike, DTypeLike
from gradserve.calls.accumulators.components import Components, ComponentSpec
from gradserve.calls.accumulators.handles import handle_of, wire_of
from gradserve.calls.accumulators.made import MadeAccumulators
from gradserve.calls.accumulators.wire import AccumulatorOptions, AccumulatorWire, Contribution
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.raw_ops.accumulator_arguments import (
    AccumulatorLike,
    accumulator_dtype,
    as_handle,
    check_apply_signature,
    check_reduction,
    check_take_signature,
    op_name,
    scalar,
)
from gradserve.calls.tensors.inputs import as_op_input
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag, as_text
from gradserve.errors import NotFoundError
from gradserve.results import AccumulatorHandle, AccumulatorKind, Average, DenseSpec, Shape, TensorLike

_REFERENCE, _RESOURCE = "string_ref", "resource"


class AccumulatorOpsBase:
    """What the ops of accumulators are carried out with."""

    def __init__(self, ids: RequestIds, timeout: float, made: MadeAccumulators) -> None:
        """Takes what the client has.

        Args:
            ids: Numbers its calls.
            timeout: For how many seconds calls wait unless they are told otherwise.
            made: Its accumulators.
        """
        self._ids = ids
        self._timeout = timeout
        self._made = made

    def _create(
        self, spec: ComponentSpec, container: str, shared_name: str, reduction_type: str, name: str
    ) -> Operation[AccumulatorHandle]:
        check_reduction(reduction_type)
        own_name = as_text(shared_name, Argument("shared_name")) or None
        options = AccumulatorOptions(reduction_type, container)
        return handle_of((yield from self._made.create(name, own_name, Components.of_one_tensor(spec), options)))

    def _wire(self, handle: AccumulatorHandle) -> AccumulatorWire:
        return wire_of(handle, self._ids)

    def _take(
        self, handle: AccumulatorHandle, num_required: ArrayLike, timeout: float | None, request_id: int | None
    ) -> Operation[Average]:
        wait = self._timeout if timeout is None else check_timeout(timeout)
        return self._wire(handle).take(scalar(num_required, np.int32, "num_required"), wait, request_id)


class AccumulatorOps(AccumulatorOpsBase):
    """The ops of dense accumulators, and those that sparse ones have, too."""

    def ConditionalAccumulator(
        self,
        *,
        dtype: DTypeLike,
        shape: Shape | None,
        container: str = "",
        shared_name: str = "",
        reduction_type: str = "MEAN",
        name: str | None = None,
    ) -> Operation[AccumulatorHandle]:
        """Creates an accumulator of dense gradients, or finds the one of this shared name.

        `Client.conditional_accumulator` makes the same accumulators, with more to choose.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: Of every gradient; None as a dimension, or instead of all, where unknown. () is a scalar.
            container: Namespace of the shared name; empty for the default one.
            shared_name: Under which other clients find it. Empty: it is this client's own and ends with it.
            reduction_type: "MEAN" or "SUM".
            name: How one without a shared name is called in lists; None for the name of the op.

        Returns:
            The handle of the accumulator, which other clients can use, too.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which. TensorFlow shares that one.
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
        container: str = "",
        shared_name: str = "",
        reduction_type: str = "MEAN",
        name: str | None = None,
    ) -> Operation[AccumulatorHandle]:
        """Creates an accumulator of dense gradients, or finds the one of this shared name: ConditionalAccumulator."""
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
        """Adds a gradient to the round; drops it when `local_step` is smaller than the accumulator's step.

        Never waits for other workers. Every call counts once, also when the network makes the client send it again.
        Whether the gradient was dropped, `ConditionalAccumulator.apply_grad` says.

        Args:
            handle: Of a dense accumulator, or the accumulator itself.
            local_step: int64, a scalar: the step at which the gradient was computed.
            gradient: Of the accumulator's dtype and shape. Or the handle of such a tensor on the server, which stays.
            worker_id: Who sends it: for diagnosis, and where the accumulator asks for it because it is deterministic or
                counts a worker once. Empty: nobody in particular, so that every call counts, as in TensorFlow.
            request_id: That of an error of an earlier attempt, to send the same gradient again.

        Raises:
            InvalidArgumentError: An argument does not fit; nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: No server; whether the gradient is in is not known. Try again with `request_id`.
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
        """Waits until `num_required` gradients are in, and returns the average of all that are.

        Bumps the accumulator's step and begins the next round. Takers are served first in, first out, strictly.

        Args:
            handle: Of a dense accumulator, or the accumulator itself.
            num_required: int32, a scalar: at least 1.
            dtype: The accumulator's.
            timeout: Seconds to wait; None for the client's timeout, math.inf for ever.
            request_id: That of an error of an earlier attempt, to get the same average.

        Returns:
            `dtype`, the shape of the gradients: their mean, or their sum.

        Raises:
            InvalidArgumentError: `num_required` is not positive, `dtype` is another, or `handle` does not fit.
            DeadlineExceededError: Not enough gradients in time; says how many are in, and from whom.
            AbortedError: The accumulator was deleted meanwhile.
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
            handle: Of a dense or sparse accumulator, or the accumulator itself.

        Returns:
            int32, a scalar.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return np.int32((yield from self._wire(as_handle(handle)).num_accumulated()))

    def ResourceAccumulatorNumAccumulated(self, *, handle: AccumulatorLike) -> Operation[np.int32]:
        """Returns the number of gradients accepted since the last take: AccumulatorNumAccumulated."""
        return np.int32((yield from self._wire(as_handle(handle)).num_accumulated()))

    def AccumulatorSetGlobalStep(self, *, handle: AccumulatorLike, new_global_step: ArrayLike) -> Operation[None]:
        """Sets the step, also to a smaller one; gradients in the round stay.

        Args:
            handle: Of a dense or sparse accumulator, or the accumulator itself.
            new_global_step: int64, a scalar.

        Raises:
            InvalidArgumentError: The step is not one.
            NotFoundError: The accumulator was deleted.
        """
        return self._set_global_step(handle, new_global_step)

    def ResourceAccumulatorSetGlobalStep(
        self, *, handle: AccumulatorLike, new_global_step: ArrayLike
    ) -> Operation[None]:
        """Sets the step: AccumulatorSetGlobalStep."""
        return self._set_global_step(handle, new_global_step)

    def DestroyResourceOp(self, *, resource: AccumulatorLike, ignore_lookup_error: bool = True) -> Operation[None]:
        """Deletes an accumulator; calls that wait on it end with AbortedError.

        Args:
            resource: The handle of a dense or sparse accumulator, or the accumulator itself.
            ignore_lookup_error: That it was gone already is no error.

        Raises:
            NotFoundError: It was gone already.
        """
        handle = as_handle(resource, field="resource")
        is_ignored = as_flag(ignore_lookup_error, Argument("ignore_lookup_error"))
        deleted = yield from self._wire(handle).delete()
        self._made.deleted(handle.name)
        if not deleted and not is_ignored:
            raise NotFoundError(f"no accumulator '{handle.container}/{handle.name}'", field="resource")

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
