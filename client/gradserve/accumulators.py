"""Accumulators, called from ordinary code. `gradserve.aio` has the same with `await`."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from gradserve.calls.accumulators import AccumulatorCalls, Contribution, GradientValue
from gradserve.results import AccumulatorInfo, ApplyResult, Average, IndexedSlices, PushPullResult
from gradserve.transport import SyncTransport
from gradserve.wire.payload import Array


class _Accumulator:
    """What all accumulators have."""

    def __init__(self, transport: SyncTransport, calls: AccumulatorCalls, timeout: float) -> None:
        self._transport = transport
        self._calls = calls
        self._timeout = timeout

    @property
    def name(self) -> str:
        """Its name on the server."""
        return self._calls.ref.name

    def num_accumulated(self) -> int:
        """Returns the number of gradients accepted since the last take."""
        return self._transport.run(self._calls.num_accumulated())

    def set_global_step(self, new_global_step: int) -> None:
        """Sets the step; gradients in the round stay."""
        self._transport.run(self._calls.set_global_step(new_global_step))

    def info(self) -> AccumulatorInfo:
        """Describes the accumulator as it is now."""
        return self._transport.run(self._calls.info())

    def delete(self) -> bool:
        """Deletes the accumulator: calls that wait on it end with AbortedError.

        Returns:
            False when it was gone already.
        """
        return self._transport.run(self._calls.delete())

    def _apply(
        self,
        gradient: Mapping[str, GradientValue],
        local_step: int,
        weight: float,
        worker_id: str,
        request_id: int | None,
    ) -> ApplyResult:
        how = Contribution(local_step, weight, worker_id)
        return self._transport.run(self._calls.apply(gradient, how, request_id))

    def _take(self, num_required: int, timeout: float | None, request_id: int | None) -> Average:
        return self._transport.run(self._calls.take(num_required, self._wait(timeout), request_id))

    def _read(self, step: int | None, timeout: float | None) -> Average:
        return self._transport.run(self._calls.read_average(step, self._wait(timeout)))

    def _wait(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout


class ConditionalAccumulator(_Accumulator):
    """TensorFlow's ConditionalAccumulator, served: averages dense gradients of one tensor.

    Made by `Client.conditional_accumulator`.
    """

    def apply_grad(
        self,
        grad: ArrayLike,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> ApplyResult:
        """Adds a gradient to the round; drops it when `local_step` is smaller than the accumulator's step.

        Never waits for other workers. Counts once, also when the network makes the client send it again.

        Args:
            grad: Of the accumulator's shape; converted to its dtype.
            local_step: The step at which it was computed.
            weight: What it counts in a mean.
            worker_id: Who sends it: for diagnosis, and the order of deterministic sums.
            request_id: That of an error of an earlier attempt, to send the same gradient again.

        Raises:
            InvalidArgumentError: Wrong dtype or shape, or the weight is not positive and finite.
            NotFoundError: The accumulator was deleted.
            UnavailableError: No server; whether the gradient is in is not known. Try again with `request_id`.
        """
        return self._apply({self._component: grad}, local_step, weight, worker_id, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Array:
        """Waits until `num_required` gradients are in, and returns the average of all that are.

        Bumps the accumulator's step and begins the next round. Takers are served first in, first out, strictly.

        Args:
            num_required: At least 1.
            timeout: Seconds to wait; None for the client's timeout.
            request_id: That of an error of an earlier attempt, to get the same average.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: Not enough gradients in time; says how many, and which workers are missing.
            AbortedError: The accumulator was deleted meanwhile.
        """
        return _dense(self._take(num_required, timeout, request_id), self._component)

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Array:
        """Returns the average of the round that led to `step` (None: the newest), without effect on the rounds.

        Waits while that step lies ahead.

        Raises:
            OutOfRangeError: It is no longer kept, or no round led to that step.
            DeadlineExceededError: It did not come within `timeout` seconds.
        """
        return _dense(self._read(step, timeout), self._component)

    @property
    def _component(self) -> str:
        return next(iter(self._calls.components))


class SparseConditionalAccumulator(_Accumulator):
    """TensorFlow's SparseConditionalAccumulator, served: averages sparse gradients of one tensor.

    A mean divides each row by the weights of the gradients that had it. Made by
    `Client.sparse_conditional_accumulator`.
    """

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: tuple[int, ...] | None = None,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> ApplyResult:
        """Adds rows to the round, as `ConditionalAccumulator.apply_grad` does a dense gradient.

        Args:
            grad_indices: Row numbers, shape [n]. Ascending lists merge fastest; equal indices in unsorted lists may
                stay separate rows.
            grad_values: Shape [n, ...].
            grad_shape: Of the whole tensor; checked against the accumulator's.
            local_step: The step at which it was computed.
            weight: What it counts in a mean.
            worker_id: Who sends it.
            request_id: That of an error of an earlier attempt.
        """
        slices = IndexedSlices(grad_values, grad_indices, grad_shape)  # type: ignore[arg-type]
        return self.apply_indexed_slices_grad(
            slices, local_step, weight=weight, worker_id=worker_id, request_id=request_id
        )

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> ApplyResult:
        """Adds rows to the round; see `apply_grad`."""
        return self._apply({self._component: grad}, local_step, weight, worker_id, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> IndexedSlices:
        """Waits for `num_required` gradients and returns their average; see `ConditionalAccumulator.take_grad`."""
        return _sparse(self._take(num_required, timeout, request_id), self._component)

    take_indexed_slices_grad = take_grad

    def read_average(self, step: int | None = None, timeout: float | None = None) -> IndexedSlices:
        """Returns the average of a past round; see `ConditionalAccumulator.read_average`."""
        return _sparse(self._read(step, timeout), self._component)

    @property
    def _component(self) -> str:
        return next(iter(self._calls.components))


class GradientAccumulator(_Accumulator):
    """Averages the gradients of a whole model: several named components, applied and counted as one.

    Made by `Client.gradient_accumulator`.
    """

    def apply_grad(
        self,
        grads: Mapping[str, GradientValue],
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str = "",
        request_id: int | None = None,
    ) -> ApplyResult:
        """Adds a gradient of every component to the round, or of none; see `ConditionalAccumulator.apply_grad`."""
        return self._apply(grads, local_step, weight, worker_id, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Average:
        """Waits for `num_required` gradients and returns their average; see `ConditionalAccumulator.take_grad`."""
        return self._take(num_required, timeout, request_id)

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Average:
        """Returns the average of a past round; see `ConditionalAccumulator.read_average`."""
        return self._read(step, timeout)

    def push_pull(
        self,
        grads: Mapping[str, GradientValue],
        num_required: int,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str = "",
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> PushPullResult:
        """Applies a gradient, waits until its round of `num_required` is full, returns the average: an all-reduce.

        A stale gradient is answered at once, with the newest average kept. A call that gives up waiting leaves its
        gradient in the round.

        Raises:
            GradserveError: As `apply_grad` and `take_grad`.
        """
        how = Contribution(local_step, weight, worker_id)
        return self._transport.run(
            self._calls.push_pull(grads, num_required, how, self._wait(timeout), request_id)
        )


def _dense(average: Average, component: str) -> Array:
    value: Any = average[component]
    return value  # type: ignore[no-any-return]


def _sparse(average: Average, component: str) -> IndexedSlices:
    value: Any = average[component]
    return value  # type: ignore[no-any-return]
