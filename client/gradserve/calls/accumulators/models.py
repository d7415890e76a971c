"""The calls of accumulators of whole models, as users see them.

The blocking and the asyncio classes take their signatures and docstrings from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from gradserve.calls.accumulators.contributions import Contribution
from gradserve.calls.accumulators.operations import AccumulatorCalls
from gradserve.calls.exchange import Operation, tracked
from gradserve.conversion.plain import as_choice
from gradserve.conversion.trees import Tree
from gradserve.results import ApplyResult, Average, Outcome, PushPullResult
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import StaleGradientError


class GradientAccumulatorCalls(AccumulatorCalls):
    """Calls of `GradientAccumulator`."""

    def apply_grad(
        self,
        grads: Tree,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        parameters_digest: bytes | None = None,
        request_id: int | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ApplyResult]:
        """Adds a gradient to the round, or drops it as stale if `local_step` is below the accumulator's step.

        Never waits for other workers. All components count, or none; once, even if the client has to send them again.

        Args:
            grads: A tree like the one that the accumulator was made of, or a dict by component name. The leaves are
                arrays of any library, numbers, handles, or IndexedSlices for sparse components. A leaf that is missing
                or None is an error, or zeros with missing="zeros" of `Client.gradient_accumulator`.
            local_step: The accumulator's step when the gradient was computed.
            weight: The weight of the gradient in a mean, from 2^-64 to 2^64 (docs/accumulator_arithmetic.md has the
                limits of other sums than float32).
            worker_id: The sender's id, for diagnoses, deterministic sums and one_per_worker. None: an id for this
                client and thread, or no id if sums are deterministic.
            parameters_digest: A digest of the sender's parameters at `local_step`, at most 32 bytes. The server
                compares those of a round, and names the workers that have another one than most:
                `Average.different_workers`. None: this worker's are not compared.
            request_id: The `request_id` of a failed attempt's error, to send the same gradient again; it still counts
                once. None: a new gradient.
            progress: Told how far the transfer of the gradient is, as by `Client.put`. An exception from the callback
                before the last call means that the gradient does not count.

        Returns:
            What became of the gradient.

        Raises:
            InvalidArgumentError: A component is missing, unknown, or of another shape, a value does not fit into its
                dtype, or the weight is not within its limits. Nothing has changed.
            NotFoundError: The accumulator was deleted, or a handle's tensor does not exist.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        how = Contribution(local_step, weight, worker_id, parameters_digest)
        return tracked(progress, partial(self._wire.apply, grads, how, request_id))

    def take_grad(
        self,
        num_required: int,
        timeout: float | None = None,
        *,
        request_id: int | None = None,
        copy: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[Average]:
        """Waits for `num_required` gradients, ends the round and returns the average of all gradients in it.

        The accumulator's step grows by one, and an empty round begins. Waiting calls are served strictly first in,
        first out.

        Args:
            num_required: The number of gradients to wait for; at least 1.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.
            request_id: The `request_id` of a failed attempt's error, to get the average of that attempt, or to wait on
                for it. None: a new take.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the average, which saves copying it.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The average by component and as a tree (`gradients`), with its step and its workers.

        Raises:
            GradserveError: See `ConditionalAccumulator.take_grad`.
        """
        return tracked(progress, partial(self._wire.take, num_required, self._wait(timeout), request_id, copy=copy))

    def read_average(
        self,
        step: int | None = None,
        timeout: float | None = None,
        *,
        copy: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[Average]:
        """Returns the average of a past round, or waits for a future one. Changes nothing.

        Args:
            step: The step that the round led to. None: the newest round that has ended.
            timeout: Seconds to wait for a future step. None: the client's timeout. math.inf: no limit.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the average, which saves copying it.
            progress: Told how far the transfer of the average is, as by `Client.put`, once it begins.

        Returns:
            The average by component and as a tree (`gradients`), with its step and its workers.

        Raises:
            GradserveError: See `ConditionalAccumulator.read_average`.
        """
        return tracked(progress, partial(self._wire.read_average, step, self._wait(timeout), copy=copy))

    def push_pull(
        self,
        grads: Tree,
        num_required: int,
        local_step: int = 0,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        parameters_digest: bytes | None = None,
        one_per_worker: bool = True,
        on_stale: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        request_id: int | None = None,
        copy: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[PushPullResult]:
        """Adds a gradient to the round, waits for `num_required` gradients and returns their average: an all-reduce.

        A call that gives up waiting leaves its gradient in the round. Called again, even with another gradient, it adds
        nothing, says so (`outcome` is ALREADY_COUNTED), and waits for the same round.

        Args:
            grads: The gradient, as in `apply_grad`.
            num_required: The number of gradients that end the round: the number of workers, or fewer if some are
                backups.
            local_step: The accumulator's step when the gradient was computed. Begin with `info().global_step`, go on
                with the `step` of the last result.
            weight: The weight of the gradient in a mean, from 2^-64 to 2^64 (docs/accumulator_arithmetic.md has the
                limits of other sums than float32).
            worker_id: The sender's id. None: an id for this client and thread, or no id if sums are deterministic. So
                each thread with a share of the work is a worker; coroutines that share a client need worker ids of
                their own.
            parameters_digest: See `apply_grad`.
            one_per_worker: Whether to count only the first gradient of each worker in a round. Gradients with an empty
                worker_id all count.
            on_stale: What to do if the gradient was dropped because the accumulator is past `local_step`. "raise":
                raise StaleGradientError. "return": return the newest average, with STALE as its `outcome`.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.
            request_id: The `request_id` of a failed attempt's error, to wait on for the average of that attempt's
                round. None: a new gradient.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the average, which saves copying it.
            progress: Told how far the transfer is, as by `Client.put`: first of the gradient, then, with its size added
                to the total, of the average.

        Returns:
            The average of the gradient's round, by component and as a tree (`gradients`).

        Raises:
            StaleGradientError: `local_step` is below the accumulator's step. The error carries the newest average.
            InvalidArgumentError: See `apply_grad`; or `num_required` is not positive, or `on_stale` is something else.
            DeadlineExceededError: There were too few gradients in time. The message says how many, which workers are
                missing, and how to wait on.
            AbortedError: The accumulator was deleted while the call waited.
            NotFoundError: The accumulator was deleted before the call, or a handle's tensor does not exist.
            UnavailableError: The server cannot be reached. It may have counted the gradient: try again with
                `request_id`.
        """
        stale = as_choice(on_stale, ("raise", "return"), Argument("on_stale"))
        how = Contribution(local_step, weight, worker_id, parameters_digest)
        wire, wait = self._wire, self._wait(timeout)
        push_pull = partial(wire.push_pull, grads, num_required, how, wait, request_id)
        result = yield from tracked(progress, partial(push_pull, one_per_worker=one_per_worker, copy=copy))
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
