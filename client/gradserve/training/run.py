"""A training run as one of its workers finds it on the server, and finds it again after a restart."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    GradserveError,
    NotFoundError,
)
from gradserve.results import AccumulatorInfo, ArrayLike, Average, DenseSpec
from gradserve.training.agreement import (
    PAUSE_SECONDS,
    agree_on_settings,
    agreed_initial_state,
    is_successor,
    resume,
)
from gradserve.training.joining import ATTEMPTS, GONE, Joining, Received
from gradserve.training.state import State

_log = logging.getLogger(__name__)

_SUCCESSION_SECONDS = 30.0
"""The time for which a worker waits for another one to delete a run that is over."""


@dataclass(frozen=True)
class Advance:
    """The averages or the state that bring a worker from its step to a newer one.

    Attributes:
        averages: What to apply, in this order: usually one average; several if the worker was late. With
            `missing="zeros"`, an average has only the parameters of which at least one worker had a gradient.
        state: What to load before, or None. A worker whose missed averages are no longer kept gets another one's state.
        was_late: Whether the worker's gradient was dropped, because its round had ended without it.
        step: The step to which this leads.
    """

    averages: tuple[Average, ...]
    state: State | None
    was_late: bool
    step: int


class Run:
    """One worker's view of a training run: the accumulator of the gradients, and what lies beside it.

    Attributes:
        accumulator: The accumulator of the gradients.
        id: The run's name and the accumulator's incarnation; no earlier run of the same name has it.
        joining: Where workers that join ask for a state.
        loss: The error that a restart of the server has caused, until this worker has found the run again.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        worker_id: str,
        components: Mapping[str, ArrayLike | DenseSpec],
        options: Mapping[str, Any],
        settings: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Finds the accumulator of the run, or makes it.

        Args:
            client: The client.
            name: The name of the run.
            worker_id: The id of this worker.
            components: The components of the accumulator.
            options: Further arguments of `Client.gradient_accumulator`.
            settings: The settings on which all workers must agree: texts by name, by kind of worker.
        """
        self._client = client
        self._name = name
        self._worker_id = worker_id
        self._components = dict(components)
        self._options = options
        self._container: str = options["container"]
        self._num_kept: int = options["keep_averages"]
        self._settings = settings
        self.find()

    def find(self) -> None:
        """Finds the accumulator of the run, or makes it."""
        incarnation = self._client.server_info().incarnation
        self._open()
        self._incarnation = incarnation
        self.loss: GradserveError | None = None

    def note_loss(self, error: GradserveError) -> bool:
        """Notes that something of the run is gone; returns False if no restart of the server explains it."""
        if self._client.server_info().incarnation == self._incarnation:
            return False
        self.loss = error
        return True

    def find_again(self, step: int, own: Callable[[], State | None]) -> tuple[int, State | None] | None:
        """Finds the run after a restart of the server, and makes a new accumulator if it has lost the earlier one.

        Args:
            step: The step of this worker.
            own: Returns the state of this worker.

        Returns:
            The step from which the run goes on, and the state with which others have begun if it begins at step 0.
            None if the server still has the earlier accumulator.
        """
        incarnation = self._client.server_info().incarnation
        earlier = self.id
        self._open()
        found: tuple[int, State | None] | None = None
        if self.id != earlier:
            base = resume(self._client, self.id, self._container, self.accumulator, step)
            self.agree_on_settings()
            begun_with: State | None = None
            if base == step == 0 and (state := own()) is not None:
                # For workers that are yet to come: they would begin with parameters of their own.
                begun_with = agreed_initial_state(self._client, self.id, self._container, self._worker_id, state)
            found = base, begun_with
        self._incarnation, self.loss = incarnation, None
        return found

    def begin_anew(self) -> int:
        """Deletes the run and starts it over if none of its workers is alive; returns the step of the run to join."""
        info = self._find_another("")
        if not info.global_step or self.joining.is_anybody_there():
            return info.global_step
        if is_successor(self._client, self._id_of(info), self._container, self._worker_id):
            _log.info(
                "training run %r is over at step %d; worker %r starts over",
                self._name,
                info.global_step,
                self._worker_id,
            )
            self._client.delete_accumulator(self._name, self._container)
        return self._find_another(info.incarnation).global_step

    def agree_on_settings(self) -> None:
        """Compares the settings of this worker with those of the first one of its kind.

        Raises:
            AlreadyExistsError: They differ.
        """
        agree_on_settings(self._client, self._present_id(), self._container, self._worker_id, self._settings)

    def agree_on_initial_state(self, own: State) -> State | None:
        """Returns the state with which the first worker has begun; None if this worker is the first."""
        return agreed_initial_state(self._client, self._present_id(), self._container, self._worker_id, own)

    def receive(self, timeout: float | None, reached: int, step: int | None) -> Received:
        """Returns the state of another worker, despite a restart of the server that the run has survived.

        Args:
            timeout: Seconds to wait for an answer. None: the client's timeout.
            reached: The step of the run.
            step: The step of this worker; None if it has not begun.

        Raises:
            DeadlineExceededError: No other worker has sent its state in time; a note says what to do.
        """
        try:
            return self._receive(timeout)
        except DeadlineExceededError as error:
            is_too_far_behind = step is not None and reached - step > self._num_kept
            error.add_note(self._too_far_behind(reached, step) if is_too_far_behind else self._nobody_answers(reached))
            if is_too_far_behind:
                error.code = "GS_CHECKPOINT_TOO_OLD"
            raise

    def _receive(self, timeout: float | None) -> Received:
        for _ in range(ATTEMPTS):
            try:
                return self.joining.receive(
                    timeout, lambda step: self.accumulator.info().global_step - step <= self._num_kept
                )
            except GONE:
                if self._present_id() != self.id:
                    raise  # the run is gone with them
        raise AbortedError(f"the requests and answers of training run {self._name!r} are deleted again and again")

    def _nobody_answers(self, reached: int) -> str:
        return (
            f"Training run {self._name!r} is at step {reached}, and none of its workers has sent its state in "
            f"time. If they have ended, go on from a checkpoint with start_step=..., or start over: delete "
            f"accumulator {self._name!r} or use another name."
        )

    def _too_far_behind(self, reached: int, step: int | None) -> str:
        kept = self._num_kept
        return (
            f"Training run {self._name!r} is at step {reached} and this worker at step {step}, but the server"
            f" keeps averages only from step {reached - kept + 1} on, and no other worker has sent its state in "
            f"time. Go on from a checkpoint of step {reached - kept} or later; or repeat the steps since then: "
            f"delete accumulator {self._name!r} and start all workers with start_step={step}. So that it does"
            " not happen again, save checkpoints more often, or start all workers with a larger keep_averages "
            f"than {kept}: at least the number of steps between two checkpoints."
        )

    def _open(self) -> None:
        self.accumulator = self._found()
        self._use(self._present_id())

    def _use(self, run_id: str) -> None:
        self.id = run_id
        self.joining = Joining(self._client, run_id, self._container, self._worker_id)

    def _found(self) -> GradientAccumulator:
        try:
            return self._client.gradient_accumulator(self._components, shared_name=self._name, **self._options)
        except AlreadyExistsError as error:
            error.add_note(
                f"All workers of training run {self._name!r} need the same parameters and the same num_required, "
                "keep_averages, missing and refuse_non_finite. If this is another run, give it another name; if the "
                "run is over, delete the accumulator."
            )
            raise

    def _find_another(self, over: str) -> AccumulatorInfo:
        """Finds or makes the accumulator of a run other than that with incarnation `over`, which is being deleted."""
        end = time.monotonic() + _SUCCESSION_SECONDS
        while True:
            self.accumulator = self._found()
            with contextlib.suppress(NotFoundError):  # deleted since it was found
                info = self.accumulator.info()
                if info.incarnation != over:
                    self._use(self._id_of(info))
                    return info
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"another worker was to delete training run {self._name!r}, which is over, and has not: it may "
                    f"have been stopped. Delete accumulator {self._name!r}, or use another name"
                )
            time.sleep(PAUSE_SECONDS)

    def _present_id(self) -> str:
        """Returns the id of the run whose accumulator the server has now."""
        return self._id_of(self.accumulator.info())

    def _id_of(self, info: AccumulatorInfo) -> str:
        return f"{self._name}/{info.incarnation}"
