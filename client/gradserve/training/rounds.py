"""One worker's part in the rounds of an accumulator: its gradients, the averages, and what its log says of them."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.conversion.plain import as_choice, as_integer, as_text
from gradserve.results import Average, DenseSpec, Outcome, PushPullResult
from gradserve.workers import TO_WAIT_ON, new_worker_id, with_all_patience, without_request_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfRangeError,
    StaleGradientError,
)

_log = logging.getLogger(__name__)
PRESENCE = "gradserve/present"
"""The component beside the gradients that says which parameters had one: 1 with a gradient, 0 without, in their order.

An average that is zero everywhere does not say whether nobody had a gradient, or those of all workers were zero. An
optimizer with weight decay or momentum has to know.
"""
OUT_OF_BATCHES = (
    "Workers that have fewer batches than this one, and are done, are missing: all have to take the same number of "
    'steps. See "A worker runs out of batches" in docs/elastic.md.'
)
"""The note on the error for a round that has not ended in time, besides the missing workers."""
IDLE_SECONDS = 24 * 3600.0
"""The seconds after its last use by a worker for which a run of hooks is kept by default."""
_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 30.0
"""After how long a wait is logged, and how long after that again."""
_WINDOW = 20
"""The number of gradients of which most must have been dropped for a warning."""
_BETWEEN_WARNINGS = 100
"""The least number of gradients from one warning to the next."""


def presence_spec(num_parameters: int) -> DenseSpec:
    """Returns the component for a number of parameters."""
    return DenseSpec("float32", (num_parameters,))


def presence_of(names: Sequence[str], present: Container[str]) -> NDArray[np.float32]:
    """Returns what a worker sends: float32, [number of names], 1 for those that are present and 0 for the others."""
    return np.asarray([name in present for name in names], np.float32)


def present_names(names: Sequence[str], average: Mapping[str, NDArray[Any]]) -> frozenset[str]:
    """Returns the names of the parameters of which at least one worker of a round had a gradient."""
    return frozenset(name for name, share in zip(names, average[PRESENCE], strict=True) if share > 0)


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


class WaitLog:
    """Says who is in and who is missing while a worker waits for its round."""

    def __init__(
        self, run: str, worker_id: str, num_required: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Logs waits for rounds of `num_required` gradients; the clock is in seconds."""
        self._run = run
        self._worker_id = worker_id
        self._num_required = num_required
        self._clock = clock
        self._wait: tuple[float, int, Collection[str]] | None = None
        self._next = _FIRST_SECONDS

    @contextmanager
    def waiting(self, step: int, members: Collection[str]) -> Iterator[None]:
        """The block in which the worker waits for the round of a step; `members` were in the round before."""
        self._next = _FIRST_SECONDS
        self._wait = (self._clock(), step, members)
        try:
            yield
        finally:
            self._wait = None

    def look(self, accumulator: GradientAccumulator) -> None:
        """Logs a wait that has lasted long enough. Called every now and then, by another thread.

        Raises:
            GradserveError: The accumulator cannot be asked.
        """
        wait = self._wait
        if wait is None or self._clock() - wait[0] < self._next:
            return
        began, step, members = wait
        self._next = self._clock() - began + _NEXT_SECONDS
        info = accumulator.info()
        if info.global_step != step or self._wait is not wait:
            return
        missing = sorted(set(members) - set(info.worker_ids))
        _log.info(
            "worker %r of training run %r has waited %.0f s at step %d: %d of %d gradients are in (workers: %s)%s",
            self._worker_id,
            self._run,
            self._clock() - began,
            step,
            info.num_accumulated,
            self._num_required,
            ", ".join(info.worker_ids) or "none",
            f"; missing of the round before: {', '.join(missing)}" if missing else "",
        )


class DropLog:
    """Logs gradients that were dropped, and warns if most of a worker's are."""

    def __init__(self, run: str, worker_id: str) -> None:
        self._run = run
        self._worker_id = worker_id
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self._num_since_warning = _BETWEEN_WARNINGS

    def note(self, step: int, reached: int, *, was_dropped: bool) -> None:
        """Notes what became of the gradient of a step; `reached` is the step of the run by then."""
        self._latest.append(was_dropped)
        self._num_since_warning += 1
        if not was_dropped:
            return
        _log.info(
            "the gradient of worker %r at step %d of training run %r was dropped: its round had ended without it, and "
            "the run was at step %d",
            self._worker_id,
            step,
            self._run,
            reached,
        )
        if 2 * sum(self._latest) > _WINDOW and self._num_since_warning > _BETWEEN_WARNINGS:
            self._num_since_warning = 0
            _log.warning(
                "%d of the last %d gradients of worker %r of training run %r were dropped: the other workers are "
                "faster and end rounds without it, so most of its work is lost. Give it smaller batches, or start the "
                "run with a larger num_required",
                sum(self._latest),
                len(self._latest),
                self._worker_id,
                self._run,
            )


class Membership:
    """A worker of a run without state to hand over: its gradients go to one accumulator or several.

    Attributes:
        name: The name of the run.
        member: The worker.
        keep_averages: The number of rounds that a worker may be late.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        num_required: int,
        worker_id: str | None,
        step: int,
        keep_averages: int,
        timeout: float | None,
        if_exists: str,
        **options: Any,
    ) -> None:
        """Takes the client, and the arguments that all hooks have, as their user has given them.

        Args:
            client: The client.
            name: The name of the run.
            num_required: The number of gradients that end a round.
            worker_id: The worker's id; None: a new one.
            step: The step at which the worker begins.
            keep_averages: The number of rounds that a worker may be late.
            timeout: Seconds to wait for the other workers; None: the client's timeout.
            if_exists: "error" if the worker must not begin in a run that is further than the worker; or "join".
            options: Further arguments of `Client.gradient_accumulator`.

        Raises:
            InvalidArgumentError: An argument is not valid.
        """
        self.name = as_text(name, Argument("name"))
        if not self.name:
            raise Argument("name").error("the name of the run", name)
        if as_integer(num_required, Argument("num_required")) < 1:
            raise Argument("num_required").error("a positive number of workers", num_required)
        worker = new_worker_id() if worker_id is None else as_text(worker_id, Argument("worker_id"))
        self.member = Member(worker, num_required, timeout)
        self.keep_averages = keep_averages
        self._must_be_new = as_choice(if_exists, ("join", "error"), Argument("if_exists")) == "error"
        self._client = client
        self._step = step
        self._options = options
        self._has_begun = False

    def rounds(self, part: str, components: Mapping[str, DenseSpec]) -> "Rounds":
        """Returns the rounds of a part of the run. Those of the first part also log gradients that are dropped.

        Raises:
            AlreadyExistsError: See `accumulator`; or the run is further, and the worker was to be in a new one.
        """
        accumulator = self.accumulator(part, components)
        drops = None
        if not self._has_begun:
            self._check_step(accumulator)
            drops = DropLog(self.name, self.member.worker_id)
            self._has_begun = True
        return Rounds(accumulator, self, self._step, drops)

    def accumulator(self, part: str, components: Mapping[str, DenseSpec]) -> GradientAccumulator:
        """Returns the accumulator of a part of the run, which the first worker makes.

        Raises:
            AlreadyExistsError: Another worker has other components, another `num_required` or another `keep_averages`.
        """
        try:
            return self._client.gradient_accumulator(
                dict(components),
                shared_name=f"{self.name}/{part}",
                keep_averages=self.keep_averages,
                agreement={"num_required": str(self.member.num_required)},
                **self._options,
            )
        except AlreadyExistsError as error:
            raise AlreadyExistsError(
                f"worker {self.member.worker_id!r} is incompatible with the other workers of run {self.name!r}: "
                f"{error.message}. All workers of a run need the same model, with the same names, shapes, dtypes and "
                "frozen parameters, and the same num_required, keep_averages and refuse_non_finite; give another run "
                "another name",
                field="name",
                code="GS_WORKERS_DIFFER",
            ) from None

    def _check_step(self, accumulator: GradientAccumulator) -> None:
        """Compares the step at which the worker begins with that of the run."""
        reached = accumulator.info().global_step
        if reached <= self._step:
            return
        said = (
            f"run {self.name!r} is at step {reached}, but worker {self.member.worker_id!r} begins at step "
            f"{self._step}. If it is to go on from a checkpoint, pass the checkpoint's step; if this is a new run, "
            "give it another name"
        )
        if self._must_be_new:
            raise AlreadyExistsError(said, field="if_exists", code="GS_RUN_EXISTS")
        _log.warning("%s. Its gradients are dropped, and it gets the averages of the run, until it has caught up", said)


class Rounds:
    """Averages gradients round by round. For one thread at a time.

    Attributes:
        step: The step at which the next gradient is computed: the number of averages so far.
    """

    def __init__(
        self, accumulator: GradientAccumulator, run: Membership, step: int, drops: DropLog | None = None
    ) -> None:
        """Averages from a step on; `drops` logs gradients that were dropped."""
        self._drops = drops
        self._accumulator = accumulator
        self._run = run
        self.step = step

    @with_all_patience()
    def average(self, gradients: Mapping[str, Any]) -> Average:
        """Returns the average of the round at this worker's step, and goes on to the next step.

        Waits for the other workers. If the round has ended without this worker, its gradients are dropped, and it gets
        the average that the others got, so that its weights stay equal to theirs.

        Returns:
            The average; its arrays are read-only.

        Raises:
            StaleGradientError: The round ended so long ago that its average is no longer kept.
            DeadlineExceededError: Too few workers sent their gradients in time; the message says which are missing.
            InvalidArgumentError: A gradient has infinities or NaN, and the run refuses these.
            GradserveError: See `GradientAccumulator.push_pull`.
        """
        run, member = self._run, self._run.member
        try:
            result = member.push_pull(self._accumulator, gradients, self.step, way_on="")  # hooks end with an error
        except InvalidArgumentError as error:
            if "finite values" in error.message:
                error.add_note(
                    "A GradScaler needs a hook with refuse_non_finite=False for all workers: the average then has "
                    "infinities for all of them, and they skip the step together."
                )
            raise
        if self._drops is not None:
            self._drops.note(self.step, result.global_step, was_dropped=result.outcome is Outcome.STALE)
        try:
            (average,) = member.averages_between(self._accumulator, self.step, result, self.step + 1)
        except OutOfRangeError:
            raise StaleGradientError(
                f"worker {member.worker_id!r} is at step {self.step}, but run {run.name!r} is at step "
                f"{result.global_step}, and keeps only the last {run.keep_averages} averages (keep_averages), "
                "so this worker cannot catch up. If it was started again, give it the weights of another "
                "worker, and their step as `step`; if this is a new run, give it another name",
                field="step",
                result=result,
                global_step=result.global_step,
            ) from None
        self.step += 1
        return average
