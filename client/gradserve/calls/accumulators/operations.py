"""The calls of accumulators of one tensor, as users see them; `models` has those of accumulators of whole models.

The blocking and the asyncio classes take their signatures and docstrings from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from gradserve.calls.accumulators.components import ONLY
from gradserve.calls.accumulators.contributions import Contribution
from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.exchange import Operation, check_timeout, tracked
from gradserve.results import (
    AccumulatorHandle,
    AccumulatorInfo,
    AccumulatorKind,
    ApplyResult,
    ArrayLike,
    Average,
    IndexedSlices,
    TensorLike,
)


class HasAccumulatorRef(Protocol):
    """An accumulator of one tensor: a ConditionalAccumulator or a SparseConditionalAccumulator."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """The accumulator's handle."""
        ...


def handle_of(wire: AccumulatorWire) -> AccumulatorHandle:
    """Returns the handle of an accumulator of one tensor."""
    (component,) = wire.components
    kind = AccumulatorKind.SPARSE if component.is_sparse else AccumulatorKind.DENSE
    return AccumulatorHandle(wire.ref.container, wire.ref.name, wire.ref.incarnation, component.dtype, kind)


class AccumulatorCalls:
    """Calls of all accumulators."""

    def __init__(self, wire: AccumulatorWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout

    @property
    def name(self) -> str:
        """The accumulator's name on the server."""
        return self._wire.ref.name

    @property
    def description(self) -> str:
        """The accumulator's name and components, on one line."""
        return f"{self._wire.ref.container}/{self._wire.ref.name}: {self._wire.components}"

    def num_accumulated(self) -> Operation[int]:
        """Returns the number of gradients in the round: those accepted since the last take.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.num_accumulated()

    def set_global_step(self, new_global_step: int, *, drop_gradients: bool = False) -> Operation[None]:
        """Sets the accumulator's step. Gradients already in the round stay in it, unless they are dropped.

        A smaller step, that of a checkpoint for example, abandons the steps after it: nobody gets their averages any
        more.

        Args:
            new_global_step: The new step. Gradients with a smaller `local_step` are stale from now on.
            drop_gradients: Whether gradients in the round do not count, if this changes the step: calls of `push_pull`
                that wait for their average get a StaleGradientError, or what `on_stale` says.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.set_global_step(new_global_step, drop_gradients=drop_gradients)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator as it is now: its step, its round, the waiting calls and the kept averages.

        Returns:
            A snapshot; it does not change with the accumulator.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.info()

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator, for all clients. Calls that wait on it end with AbortedError.

        Returns:
            Whether it still existed.
        """
        return self._wire.delete()

    def _wait(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)


class OneTensorAccumulatorCalls(AccumulatorCalls):
    """Calls of all accumulators of one tensor."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """The accumulator's handle, for the ops of `RawOps` of this client and of others."""
        return handle_of(self._wire)


class ConditionalAccumulatorCalls(OneTensorAccumulatorCalls):
    """Calls of `ConditionalAccumulator`."""

    def apply_grad(
        self,
        grad: TensorLike,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ApplyResult]:
        """Adds a gradient to the round, or drops it as stale if `local_step` is below the accumulator's step.

        Never waits for other workers. The gradient counts once, even if the client has to send it again.

        Args:
            grad: The gradient, of the accumulator's shape: an array of any library, numbers, or the handle of a tensor
                on the server, which stays there. Its values are converted to the accumulator's dtype.
            local_step: The accumulator's step when the gradient was computed.
            weight: The weight of the gradient in a mean, from 2^-64 to 2^64 (docs/accumulator_arithmetic.md has the
                limits of other sums than float32).
            worker_id: The sender's id, for diagnoses, deterministic sums and one_per_worker. None: an id for this
                client and thread, or no id if sums are deterministic.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again; it still counts
                once. None: a new gradient.
            progress: Told how far the transfer of the gradient is, as by `Client.put`. An exception from the callback
                before the last call means that the gradient does not count.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: The gradient has another shape, a value does not fit into the dtype, or the weight is
                not within its limits. Nothing has changed.
            NotFoundError: The accumulator was deleted, or the handle's tensor does not exist.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        how = Contribution(local_step, weight, worker_id)
        return tracked(progress, partial(self._wire.apply, {ONLY: grad}, how, request_id))

    def take_grad(
        self,
        num_required: int,
        timeout: float | None = None,
        *,
        request_id: int | None = None,
        copy: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[NDArray[Any]]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out. A call that gives up leaves the round as it is.

        Args:
            num_required: The number of gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.
            request_id: The `request_id` of a failed attempt's error, to get the average of that attempt, or to wait on
                for it. None: a new take.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the average, which saves copying it.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The average, of the accumulator's dtype.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: There were too few gradients in time. The message says how many, and which workers
                are missing.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before the call.
            UnavailableError: The server cannot be reached: try again with `request_id`.
        """
        take = partial(self._wire.take, num_required, self._wait(timeout), request_id, copy=copy)
        average = yield from tracked(progress, take)
        taken: NDArray[Any] = _only(average)
        return taken

    def read_average(
        self,
        step: int | None = None,
        timeout: float | None = None,
        *,
        copy: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[NDArray[Any]]:
        """Returns the average of a past round, or waits for a future one. Changes nothing.

        Any number of clients can read an average while the accumulator keeps it (`keep_averages`).

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a future step. None: the client's timeout. math.inf: no limit.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the average, which saves copying it.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The average, of the accumulator's dtype.

        Raises:
            OutOfRangeError: The average is no longer kept, or no round led to that step.
            DeadlineExceededError: The round did not end in time.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before the call.
        """
        average = yield from tracked(progress, partial(self._wire.read_average, step, self._wait(timeout), copy=copy))
        read: NDArray[Any] = _only(average)
        return read


class SparseConditionalAccumulatorCalls(OneTensorAccumulatorCalls):
    """Calls of `SparseConditionalAccumulator`."""

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: tuple[int, ...] | None = None,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ApplyResult]:
        """Adds rows to the round, or drops them as stale if `local_step` is below the accumulator's step.

        Never waits for other workers. The rows count once, even if the client has to send them again.

        Args:
            grad_indices: The numbers of the rows: integers, shape [n]. Ascending numbers merge fastest; equal numbers
                in unsorted lists may stay separate rows.
            grad_values: The rows, shape [n, ...]; converted to the accumulator's dtype.
            grad_shape: The shape of the whole tensor, checked against the accumulator's. None: not checked.
            local_step: The accumulator's step when the gradient was computed.
            weight: The weight of the gradient in a mean, from 2^-64 to 2^64 (docs/accumulator_arithmetic.md has the
                limits of other sums than float32).
            worker_id: The sender's id, for diagnoses, deterministic sums and one_per_worker. None: an id for this
                client and thread, or no id if sums are deterministic.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again; it still counts
                once. None: a new gradient.
            progress: Told how far the transfer of the gradient is, as by `Client.put`. An exception from the callback
                before the last call means that the gradient does not count.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: Indices and values do not fit together or into the accumulator's shape, or the weight
                is not within its limits. Nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        slices = IndexedSlices(cast(NDArray[Any], grad_values), cast(NDArray[Any], grad_indices), grad_shape)
        return self.apply_indexed_slices_grad(
            slices, local_step, weight=weight, worker_id=worker_id, request_id=request_id, progress=progress
        )

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ApplyResult]:
        """Adds rows to the round, as `apply_grad` does, with indices, values and shape in one object.

        Args:
            grad: The rows: gradserve's IndexedSlices, or another library's, such as tf.IndexedSlices.
            local_step: The accumulator's step when the gradient was computed.
            weight: The weight of the gradient in a mean, from 2^-64 to 2^64 (docs/accumulator_arithmetic.md has the
                limits of other sums than float32).
            worker_id: The sender's id, for diagnoses, deterministic sums and one_per_worker. None: an id for this
                client and thread, or no id if sums are deterministic.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again; it still counts
                once. None: a new gradient.
            progress: Told how far the transfer of the gradient is, as by `Client.put`. An exception from the callback
                before the last call means that the gradient does not count.

        Returns:
            What became of the gradient.

        Raises:
            GradserveError: See `apply_grad`.
        """
        how = Contribution(local_step, weight, worker_id)
        return tracked(progress, partial(self._wire.apply, {ONLY: grad}, how, request_id))

    def take_grad(
        self,
        num_required: int,
        timeout: float | None = None,
        *,
        request_id: int | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[IndexedSlices]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out. A mean divides each row by the total weight of the gradients that have this row.

        Args:
            num_required: The number of gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.
            request_id: The `request_id` of a failed attempt's error, to get the average of that attempt, or to wait on
                for it. None: a new take.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The rows of the average with their numbers, and the shape of the whole tensor.

        Raises:
            GradserveError: See `ConditionalAccumulator.take_grad`.
        """
        take = partial(self._wire.take, num_required, self._wait(timeout), request_id)
        average = yield from tracked(progress, take)
        taken: IndexedSlices = _only(average)
        return taken

    def read_average(
        self,
        step: int | None = None,
        timeout: float | None = None,
        *,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[IndexedSlices]:
        """Returns the average of a past round, or waits for a future one. Changes nothing.

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a future step. None: the client's timeout. math.inf: no limit.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The rows of the average with their numbers, and the shape of the whole tensor.

        Raises:
            GradserveError: See `ConditionalAccumulator.read_average`.
        """
        average = yield from tracked(progress, partial(self._wire.read_average, step, self._wait(timeout)))
        read: IndexedSlices = _only(average)
        return read


def _only(average: Average) -> Any:
    return average.components[ONLY]
