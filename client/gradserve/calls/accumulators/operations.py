"""The calls of accumulators, by kind, as their users see them.

The signatures and docstrings here are those of the blocking and of the asyncio classes.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from numpy.typing import NDArray

from gradserve.array_like import ArrayLike
from gradserve.calls.accumulators.handles import handle_of
from gradserve.calls.accumulators.wire import AccumulatorWire, Contribution
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_choice
from gradserve.conversion.trees import Tree
from gradserve.errors import StaleGradientError
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
        """Returns how many gradients are in the round: those accepted since the last take.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.num_accumulated()

    def set_global_step(self, new_global_step: int) -> Operation[None]:
        """Sets the accumulator's step. Gradients that are in the round stay in it.

        Args:
            new_global_step: From now on, gradients with a smaller `local_step` are stale.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.set_global_step(new_global_step)

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator as it is now: its step, its round, who waits, and which averages are kept.

        Returns:
            The description. It does not change with the accumulator.

        Raises:
            NotFoundError: The accumulator was deleted.
        """
        return self._wire.info()

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator, for all clients. Calls that wait on it end with AbortedError.

        Returns:
            Whether it was still there.
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
        """Adds a gradient to the round, or drops it as stale when `local_step` is below the accumulator's step.

        Never waits for other workers. The gradient counts once, also when the network makes the client send it again.

        Args:
            grad: The gradient, of the accumulator's shape: an array of any library, numbers, or the handle of a tensor
                on the server, which stays there. Its values are converted to the accumulator's dtype.
            local_step: The accumulator's step when the gradient was computed.
            weight: How much the gradient counts in a mean; positive and finite.
            worker_id: Who sends the gradient. Names workers in diagnoses, orders deterministic sums, and is what
                one_per_worker counts by. None: this client and thread, or nobody where sums are deterministic.
            request_id: The `request_id` of an error of an earlier attempt: sends the same gradient again, which still
                counts once. None: a new gradient.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: The gradient has another shape, a value does not fit into the dtype, or the weight is
                not positive and finite. Nothing has changed.
            NotFoundError: The accumulator was deleted, or the handle's tensor does not exist (any more).
            UnavailableError: The server cannot be reached. Whether the gradient is in is not known: try again with
                `request_id`.
        """
        how = Contribution(local_step, weight, worker_id)
        return self._wire.apply({self._component: grad}, how, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[NDArray[Any]]:
        """Waits until `num_required` gradients are in, ends the round, and returns the average of all in it.

        The accumulator's step grows by one, and the next round begins empty. Takers are served strictly first in, first
        out. One that gives up leaves the round as it is.

        Args:
            num_required: How many gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: as long as it takes.
            request_id: The `request_id` of an error of an earlier attempt: returns the average that was meant for it,
                or waits on. None: a new take.

        Returns:
            The average, of the accumulator's dtype.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: There were not enough gradients in time. Says how many are in, and which workers are
                missing.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before.
            UnavailableError: The server cannot be reached: try again with `request_id`.
        """
        average = yield from self._wire.take(num_required, self._wait(timeout), request_id)
        taken: NDArray[Any] = _only(average)
        return taken

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[NDArray[Any]]:
        """Returns the average of a past round, or waits for that of a coming one. It has no effect on the rounds.

        Any number of readers can have it, as long as the accumulator keeps it (`keep_averages`).

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a step that lies ahead. None: the client's timeout. math.inf: as long as it
                takes.

        Returns:
            The average, of the accumulator's dtype.

        Raises:
            OutOfRangeError: The average is no longer kept, or no round led to that step.
            DeadlineExceededError: The round did not end in time.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before.
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
        """Adds rows to the round, or drops them as stale when `local_step` is below the accumulator's step.

        Never waits for other workers. The rows count once, also when the network makes the client send them again.

        Args:
            grad_indices: The numbers of the rows: integers, shape [n]. Ascending numbers merge fastest; equal numbers
                in unsorted lists may stay separate rows.
            grad_values: The rows, shape [n, ...]; converted to the accumulator's dtype.
            grad_shape: The shape of the whole tensor, checked against the accumulator's. None: not checked.
            local_step: The accumulator's step when the gradient was computed.
            weight: How much the gradient counts in a mean; positive and finite.
            worker_id: Who sends the gradient. Names workers in diagnoses, orders deterministic sums, and is what
                one_per_worker counts by. None: this client and thread, or nobody where sums are deterministic.
            request_id: The `request_id` of an error of an earlier attempt: sends the same gradient again, which still
                counts once. None: a new gradient.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: Indices and values do not fit together or into the accumulator's shape, or the weight
                is not positive and finite. Nothing has changed.
            NotFoundError: The accumulator was deleted.
            UnavailableError: The server cannot be reached. Whether the gradient is in is not known: try again with
                `request_id`.
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
        """Adds rows to the round, as `apply_grad` does, with indices, values and shape in one object.

        Args:
            grad: The rows: gradserve's IndexedSlices, or those of another library, such as tf.IndexedSlices.
            local_step: The accumulator's step when the gradient was computed.
            weight: How much the gradient counts in a mean; positive and finite.
            worker_id: Who sends the gradient. Names workers in diagnoses, orders deterministic sums, and is what
                one_per_worker counts by. None: this client and thread, or nobody where sums are deterministic.
            request_id: The `request_id` of an error of an earlier attempt: sends the same gradient again, which still
                counts once. None: a new gradient.

        Returns:
            What became of the gradient.

        Raises:
            GradserveError: As `apply_grad`.
        """
        how = Contribution(local_step, weight, worker_id)
        return self._wire.apply({self._component: grad}, how, request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[IndexedSlices]:
        """Waits until `num_required` gradients are in, ends the round, and returns the average of all in it.

        The accumulator's step grows by one, and the next round begins empty. Takers are served strictly first in, first
        out. A mean divides each row by the total weight of the gradients that have this row.

        Args:
            num_required: How many gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: as long as it takes.
            request_id: The `request_id` of an error of an earlier attempt: returns the average that was meant for it,
                or waits on. None: a new take.

        Returns:
            The rows of the average with their numbers, and the shape of the whole tensor.

        Raises:
            GradserveError: As `ConditionalAccumulator.take_grad`.
        """
        average = yield from self._wire.take(num_required, self._wait(timeout), request_id)
        taken: IndexedSlices = _only(average)
        return taken

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[IndexedSlices]:
        """Returns the average of a past round, or waits for that of a coming one. It has no effect on the rounds.

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a step that lies ahead. None: the client's timeout. math.inf: as long as it
                takes.

        Returns:
            The rows of the average with their numbers, and the shape of the whole tensor.

        Raises:
            GradserveError: As `ConditionalAccumulator.read_average`.
        """
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
        """Adds a gradient to the round, all components or none; drops it as stale when `local_step` is too small.

        Never waits for other workers. The gradient counts once, also when the network makes the client send it again.

        Args:
            grads: A tree like the one that the accumulator was made of, or a dict by the names of its components. The
                leaves are arrays of any library, numbers, handles, or IndexedSlices for sparse components. A leaf that
                is missing or None is an error, or counts as zeros with missing="zeros" of
                `Client.gradient_accumulator`.
            local_step: The accumulator's step when the gradient was computed.
            weight: How much the gradient counts in a mean; positive and finite.
            worker_id: Who sends the gradient. Names workers in diagnoses, orders deterministic sums, and is what
                one_per_worker counts by. None: this client and thread, or nobody where sums are deterministic.
            request_id: The `request_id` of an error of an earlier attempt: sends the same gradient again, which still
                counts once. None: a new gradient.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: A component is missing, unknown, or of another shape, a value does not fit into its
                dtype, or the weight is not positive and finite. Nothing has changed.
            NotFoundError: The accumulator was deleted, or a handle's tensor does not exist (any more).
            UnavailableError: The server cannot be reached. Whether the gradient is in is not known: try again with
                `request_id`.
        """
        return self._wire.apply(grads, Contribution(local_step, weight, worker_id), request_id)

    def take_grad(
        self, num_required: int, timeout: float | None = None, *, request_id: int | None = None
    ) -> Operation[Average]:
        """Waits until `num_required` gradients are in, ends the round, and returns the average of all in it.

        The accumulator's step grows by one, and the next round begins empty. Takers are served strictly first in, first
        out.

        Args:
            num_required: How many gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: as long as it takes.
            request_id: The `request_id` of an error of an earlier attempt: returns the average that was meant for it,
                or waits on. None: a new take.

        Returns:
            The average by component, as a tree too (`gradients`), with its step and who is in it.

        Raises:
            GradserveError: As `ConditionalAccumulator.take_grad`.
        """
        return self._wire.take(num_required, self._wait(timeout), request_id)

    def read_average(self, step: int | None = None, timeout: float | None = None) -> Operation[Average]:
        """Returns the average of a past round, or waits for that of a coming one. It has no effect on the rounds.

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a step that lies ahead. None: the client's timeout. math.inf: as long as it
                takes.

        Returns:
            The average by component, as a tree too (`gradients`), with its step and who is in it.

        Raises:
            GradserveError: As `ConditionalAccumulator.read_average`.
        """
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
        """Adds a gradient to the round, waits until `num_required` are in, and returns their average: an all-reduce.

        A call that gives up waiting leaves its gradient in the round. Called again, also with another gradient, it adds
        nothing, says so (`outcome` is ALREADY_COUNTED), and waits for the same round.

        Args:
            grads: The gradient, as in `apply_grad`.
            num_required: How many gradients end the round: the number of workers, or fewer where some are backups.
            local_step: The accumulator's step when the gradient was computed. Begin with `info().global_step`, go on
                with the `step` of the last result.
            weight: How much the gradient counts in a mean; positive and finite.
            worker_id: Who sends the gradient. None: this client and thread, so that each thread with a share of the
                work is a worker; coroutines that share a client need worker ids of their own. Nobody where sums are
                deterministic.
            one_per_worker: Count only the first gradient of each worker in a round. Those with an empty worker_id all
                count.
            on_stale: What to do when the accumulator is past `local_step` and the gradient was dropped. "raise":
                StaleGradientError. "return": the newest average, with STALE as its `outcome`.
            timeout: Seconds to wait. None: the client's timeout. math.inf: as long as it takes.
            request_id: The `request_id` of an error of an earlier attempt: waits on for the average of that attempt's
                round. None: a new gradient.

        Returns:
            The average of the round that the gradient is in, by component and as a tree (`gradients`).

        Raises:
            StaleGradientError: `local_step` is smaller than the accumulator's step. The error carries the newest
                average.
            InvalidArgumentError: As `apply_grad`; or `num_required` is not positive, or on_stale is something else.
            DeadlineExceededError: There were not enough gradients in time. Says how many are in, which workers are
                missing, and how to wait on.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before, or a handle's tensor does not exist (any more).
            UnavailableError: The server cannot be reached. Whether the gradient is in is not known: try again with
                `request_id`.
        """
        stale = as_choice(on_stale, ("raise", "return"), Argument("on_stale"))
        how = Contribution(local_step, weight, worker_id)
        result = yield from self._wire.push_pull(
            grads, num_required, how, self._wait(timeout), request_id, one_per_worker=one_per_worker
        )
        if result.outcome is Outcome.STALE and stale == "raise":
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
