"""The calls of accumulators, by kind, as their users see them.

The signatures and docstrings here are those of the blocking and of the asyncio classes.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from numpy.typing import ArrayLike, NDArray

from gradserve.calls.accumulator_handles import handle_of
from gradserve.calls.accumulator_wire import AccumulatorWire, Contribution
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.conversion.trees import Tree
from gradserve.errors import InvalidArgumentError, StaleGradientError
from gradserve.results import (
    AccumulatorHandle,
    AccumulatorInfo,
    ApplyResult,
    Average,
    IndexedSlices,
    Outcome,
    PushPullResult,
    TensorLike,
)


class AccumulatorCalls:
    """What all accumulators have."""

    def __init__(self, wire: AccumulatorWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout

    @property
    def name(self) -> str:
        """Its name on the server."""
        return self._wire.ref.name

    @property
    def description(self) -> str:
        """Its name and its components in a line."""
        return f"{self._wire.ref.container}/{self._wire.ref.name}: {self._wire.components}"

    def num_accumulated(self) -> Operation[int]:
        """Returns the number of gradients accepted since the last take."""
        return self._wire.num_accumulated()

    def set_global_step(self, new_global_step: int) -> Operation[None]:
        """Sets the step; gradients in the round stay."""
        return self._wire.set_global_step(new_global_step)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator as it is now."""
        return self._wire.info()

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator: calls that wait on it end with AbortedError.

        Returns:
            False when it was gone already.
        """
        return self._wire.delete()

    def _wait(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)


class OneTensorAccumulatorCalls(AccumulatorCalls):
    """What accumulators of one tensor have."""

    @property
    def accumulator_ref(self) -> AccumulatorHandle:
        """Its handle, for the ops of `RawOps`, in this client and in others."""
        return handle_of(self._wire)

    @property
    def _component(self) -> str:
        """The name of the only component."""
        return next(iter(self._wire.components)).name


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
    ) -> Operation[ApplyResult]:
        """Adds a gradient to the round; drops it when `local_step` is smaller than the accumulator's step.

        Never waits for other workers. Counts once, also when the network makes the client send it again.

        Args:
            grad: Of the accumulator's shape; converted to its dtype. An array of any library, numbers, or the handle of
                a tensor on the server, which stays there.
            local_step: The step at which it was computed.
            weight: What it counts in a mean.
            worker_id: Who sends it: for diagnosis, for deterministic sums, and for accumulators that count one gradient
                per worker. None: the client and thread, except where sums are deterministic.
            request_id: That of an error of an earlier attempt, to send the same gradient again.

        Raises:
            InvalidArgumentError: Wrong shape, a value that does not fit into the dtype, or the weight is not positive
                and finite.
            NotFoundError: The accumulator was deleted.
            UnavailableError: No server; whether the gradient is in is not known. Try again with `request_id`.
        """
        how = Contribution(local_step, weight, worker_id)
        return self._wire.apply({self._component: grad}, how, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[NDArray[Any]]:
        """Waits until `num_required` gradients are in, and returns the average of all that are.

        Bumps the accumulator's step and begins the next round. Takers are served first in, first out, strictly.

        Args:
            num_required: At least 1.
            timeout: Seconds to wait; None for the client's timeout, math.inf for as long as it takes.
            request_id: That of an error of an earlier attempt, to get the same average.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: Not enough gradients in time; says how many, and which workers are missing.
            AbortedError: The accumulator was deleted meanwhile.
        """
        average = yield from self._wire.take(num_required, self._wait(timeout), request_id)
        taken: NDArray[Any] = _only(average)
        return taken

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[NDArray[Any]]:
        """Returns the average of the round that led to `step` (None: the newest), without effect on the rounds.

        Waits while that step lies ahead, at most `timeout` seconds (None: the client's timeout, math.inf: for ever).

        Raises:
            OutOfRangeError: It is no longer kept, or no round led to that step.
            DeadlineExceededError: It did not come within `timeout` seconds.
        """
        average = yield from self._wire.read_average(step, self._wait(timeout))
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
    ) -> Operation[ApplyResult]:
        """Adds rows to the round, as `ConditionalAccumulator.apply_grad` does a dense gradient.

        Args:
            grad_indices: Row numbers, shape [n]. Ascending lists merge fastest; equal indices in unsorted lists may
                stay separate rows.
            grad_values: Shape [n, ...].
            grad_shape: Of the whole tensor; checked against the accumulator's.
            local_step: The step at which it was computed.
            weight: What it counts in a mean.
            worker_id: Who sends it; see `ConditionalAccumulator.apply_grad`.
            request_id: That of an error of an earlier attempt.
        """
        slices = IndexedSlices(cast(NDArray[Any], grad_values), cast(NDArray[Any], grad_indices), grad_shape)
        return self.apply_indexed_slices_grad(
            slices, local_step, weight=weight, worker_id=worker_id, request_id=request_id
        )

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
    ) -> Operation[ApplyResult]:
        """Adds rows to the round; see `apply_grad`."""
        how = Contribution(local_step, weight, worker_id)
        return self._wire.apply({self._component: grad}, how, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[IndexedSlices]:
        """Waits for `num_required` gradients and returns their average; see `ConditionalAccumulator.take_grad`.

        A mean divides each row by the weights of the gradients that had it.
        """
        average = yield from self._wire.take(num_required, self._wait(timeout), request_id)
        taken: IndexedSlices = _only(average)
        return taken

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[IndexedSlices]:
        """Returns the average of a past round; see `ConditionalAccumulator.read_average`."""
        average = yield from self._wire.read_average(step, self._wait(timeout))
        read: IndexedSlices = _only(average)
        return read


class GradientAccumulatorCalls(AccumulatorCalls):
    """Calls of `GradientAccumulator`."""

    def apply_grad(
        self,
        grads: Tree,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
    ) -> Operation[ApplyResult]:
        """Adds a gradient of every component to the round, or of none; see `ConditionalAccumulator.apply_grad`.

        `grads` is a tree like the one that the accumulator was made of, or a dict by the names of the components. Its
        leaves are arrays of any library, handles or IndexedSlices. None for one that is not there: an error, or zeros
        with missing="zeros".
        """
        return self._wire.apply(grads, Contribution(local_step, weight, worker_id), request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[Average]:
        """Waits for `num_required` gradients and returns their average; see `ConditionalAccumulator.take_grad`."""
        return self._wire.take(num_required, self._wait(timeout), request_id)

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[Average]:
        """Returns the average of a past round; see `ConditionalAccumulator.read_average`."""
        return self._wire.read_average(step, self._wait(timeout))

    def push_pull(
        self,
        grads: Tree,
        num_required: int,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        one_per_worker: bool = True,
        on_stale: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> Operation[PushPullResult]:
        """Applies a gradient, waits until its round of `num_required` is full, returns the average: an all-reduce.

        A call that gives up waiting leaves its gradient in the round. Called again, also with another gradient, it adds
        nothing, says so (`outcome` is ALREADY_COUNTED), and waits for the same round.

        Args:
            grads: By component.
            num_required: How many gradients end the round: the number of workers, or fewer where some are backups.
            local_step: The step at which they were computed. Start from `info().global_step`, go on with the `step` of
                the last result.
            weight: What they count in a mean.
            worker_id: Who sends them. None: the client and thread, so that each thread with a share of the work is a
                worker; coroutines that share a client need worker ids of their own.
            one_per_worker: Count only the first gradient of each worker in a round. Those with an empty worker_id all
                count.
            on_stale: What to do when the accumulator is past `local_step` and the gradients were dropped: raise
                StaleGradientError, or return the newest average, with STALE as its `outcome`.
            timeout: Seconds to wait; None for the client's timeout, math.inf for ever.
            request_id: That of an error of an earlier attempt, to get the average of that attempt's round.

        Returns:
            The average of the round, by component.

        Raises:
            StaleGradientError: `local_step` is smaller than the accumulator's step. It carries the newest average.
            InvalidArgumentError: Wrong components, dtypes or shapes, or `num_required` is not positive.
            DeadlineExceededError: Not enough gradients in time; says how many, which workers are missing, and how to
                wait on.
            AbortedError: The accumulator was deleted meanwhile.
            UnavailableError: No server; whether the gradients are in is not known. Try again with `request_id`.
        """
        if on_stale not in ("raise", "return"):
            raise InvalidArgumentError(f"expected 'raise' or 'return' for on_stale, got {on_stale!r}", field="on_stale")
        how = Contribution(local_step, weight, worker_id)
        result = yield from self._wire.push_pull(
            grads, num_required, how, self._wait(timeout), request_id, one_per_worker=one_per_worker
        )
        if result.outcome is Outcome.STALE and on_stale == "raise":
            raise StaleGradientError(
                f"the gradient was computed at step {local_step}, but accumulator {self.name!r} is at step "
                f"{result.global_step}: it was dropped. Go on from the accumulator's step (info().global_step, or the "
                "step of the last result); this error carries the newest average, and on_stale='return' returns it",
                field="local_step",
                result=result,
                global_step=result.global_step,
            )
        return result


def _only(average: Average) -> Any:
    (value,) = average.values()
    return value
