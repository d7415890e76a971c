"""One worker's part in the rounds of one accumulator."""

import logging
from collections.abc import Mapping
from typing import Any

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.conversion.plain import as_choice, as_integer, as_text
from gradserve.results import Average, DenseSpec, Outcome
from gradserve.training.rounds import DropLog, Member
from gradserve.workers import new_worker_id, with_all_patience
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    OutOfRangeError,
    StaleGradientError,
)

_log = logging.getLogger(__name__)

IDLE_SECONDS = 24 * 3600.0
"""The seconds after its last use by a worker for which a run of hooks is kept by default."""


class Membership:
    """A worker of a run, whose gradients go to one accumulator or several.

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
