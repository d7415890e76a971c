"""One worker's gradients in the rounds of an accumulator, and the averages of rounds that ended without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradserve.accumulators import GradientAccumulator
from gradserve.results import Average, PushPullResult
from gradserve.workers import TO_WAIT_ON, without_request_id
from gradserve_protocol.errors import DeadlineExceededError

OUT_OF_BATCHES = (
    "Workers that have fewer batches than this one, and are done, are missing: all have to take the same number of "
    'steps. See "A worker runs out of batches" in docs/elastic.md.'
)
"""The note on the error for a round that has not ended in time, besides the missing workers."""


@dataclass(frozen=True)
class Member:
    """A worker of a training run.

    Attributes:
        worker_id: The worker's id.
        num_required: The number of gradients that end a round.
        timeout: Seconds to wait for the other workers; None: the client's timeout.
    """

    worker_id: str
    num_required: int
    timeout: float | None

    def push_pull(
        self,
        accumulator: GradientAccumulator,
        gradients: Mapping[str, Any],
        step: int,
        weight: float = 1.0,
        *,
        digest: bytes | None = None,
        way_on: str = TO_WAIT_ON,
    ) -> PushPullResult:
        """Sends a gradient of a step, and waits for the average of its round; the newest average if that has ended.

        Args:
            accumulator: The accumulator.
            gradients: The gradients, by component.
            step: The step at which they were computed.
            weight: Their weight in the mean.
            digest: A digest of the worker's parameters, to be compared with those of others; None for none.
            way_on: What an error says of how to wait on.

        Raises:
            DeadlineExceededError: Too few workers sent their gradients in time; the message says which are missing.
            GradserveError: See `GradientAccumulator.push_pull`.
        """
        try:
            return accumulator.push_pull(
                dict(gradients),
                self.num_required,
                step,
                weight=weight,
                worker_id=self.worker_id,
                parameters_digest=digest,
                on_stale="return",
                timeout=self.timeout,
                copy=False,
            )
        except DeadlineExceededError as error:
            without_request_id(error, way_on)
            error.add_note(OUT_OF_BATCHES)
            raise

    def averages_between(
        self, accumulator: GradientAccumulator, step: int, result: PushPullResult, reached: int
    ) -> tuple[Average, ...]:
        """Returns the averages of all rounds that lead from one step to another; reads those that a result is not.

        Raises:
            OutOfRangeError: The server does not keep all of them.
            AbortedError: One of several servers has lost its part of them.
        """
        return tuple(
            result
            if each == result.step and result.components
            else accumulator.read_average(each, timeout=self.timeout, copy=False)
            for each in range(step + 1, reached + 1)
        )
