"""How a worker that begins later gets the state of one that is training."""

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.errors import (
    AbortedError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    LostError,
    NotFoundError,
    OutOfRangeError,
)
from gradserve.results import DenseSpec
from gradserve.training.state import COMPONENTS, TEXT, Arrived, Carried, State, as_text, of_text
from gradserve.training.succession import PAUSE_SECONDS

_T = TypeVar("_T")
GONE = (AbortedError, LostError, NotFoundError)
"""The errors of accumulators that a restart has lost, that somebody has deleted, or that nobody has used for long."""
ATTEMPTS = 4
"""How often something is tried if accumulators are gone: each of the three may say so once, and a restart is rare."""
_NEVER_STALE = 1 << 62
"""A local step that no accumulator reaches: what is sent here has no step."""
_MOST_ANSWERS = 10
"""How many answers a worker that joins waits for, if each is too old when it has arrived."""
_KEPT_SECONDS = 24 * 3600.0
"""How long after the last use by a worker the rest is kept."""
_ANSWERS_KEPT = 16
"""How many answers are kept: workers that answer at once may say so in another order than they sent their states."""
_STATES_KEPT_SECONDS = 3600.0
"""How long after its last use a state is kept, which takes as much memory as a model with its optimizer."""


_ROLL_CALL, _PRESENT = "gradserve/roll-call/", "gradserve/present/"
_ROLL_CALL_SECONDS = 5.0
"""How long a roll call waits for an answer: workers look for calls every quarter of a second, whatever they compute."""


@dataclass(frozen=True)
class Received:
    """A state that another worker has sent.

    Attributes:
        state: The state.
        step: The step that it belongs to.
    """

    state: State
    step: int


class Joining:
    """Requests for the state of a training run, and the answers to them, in accumulators beside that of the gradients.

    NAME/requests: its gradients are requests; a round ends when they are answered, all together.
    NAME/answers: each average is an answer: the step, and which average of the next one is the state; or why there is
    none.
    NAME/state: each average is a state.

    Whoever leaves the run sends its state, too: for those that are late, or come when the others have ended.

    NAME is that of the training run, with what distinguishes it from earlier runs of the same name.

    A request whose sender is ROLL_CALL and a number asks whether anybody is there: each worker answers at once, with a
    request whose sender is PRESENT and that number.

    They need no memory on a disk: what a restart of the server has lost is made again, as are accumulators that have
    gone because nobody has joined for a day.
    """

    def __init__(self, client: Client, name: str, container: str, worker_id: str) -> None:
        self._client = client
        self._name = name
        self._container = container
        self._worker_id = worker_id
        self._answered_calls: set[str] = set()
        self._open()

    def _open(self) -> None:
        self._requests = self._accumulator("requests", {"request": DenseSpec("float32", ())}, ends_when_lost=True)
        self._answers = self._accumulator("answers", {"text": TEXT}, keep_averages=_ANSWERS_KEPT, ends_when_lost=True)

    def _despite_loss(self, attempt: Callable[[], _T]) -> _T:
        """Returns what an attempt returns; makes accumulators that are gone again, and tries again."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(*GONE):
                return attempt()
            self._open()
        return attempt()

    def requesters(self) -> Collection[str]:
        """Returns the ids of the workers that wait for a state; answers roll calls."""
        senders = self._despite_loss(lambda: self._requests.info().worker_ids)
        for sender in senders:
            if sender.startswith(_ROLL_CALL) and sender not in self._answered_calls:
                self._answered_calls.add(sender)
                self._request(_PRESENT + sender.removeprefix(_ROLL_CALL))
        return tuple(each for each in senders if not each.startswith((_ROLL_CALL, _PRESENT)))

    def is_anybody_there(self) -> bool:
        """Returns True if a worker that has begun answers a roll call. Takes seconds if there is none."""
        end = time.monotonic() + _ROLL_CALL_SECONDS
        number = ""
        while True:
            senders = self._despite_loss(lambda: self._requests.info().worker_ids)
            if number and _PRESENT + number in senders:
                return True
            if _ROLL_CALL + number not in senders:  # not made yet, or gone with requests that were answered
                number = uuid.uuid4().hex
                self._request(_ROLL_CALL + number)
            if time.monotonic() > end:
                return False
            time.sleep(PAUSE_SECONDS)

    def answer(self, carried: Carried, step: int) -> None:
        """Sends a state to all who wait for one.

        Args:
            carried: The state.
            step: The step that it belongs to.
        """
        self._despite_loss(lambda: self._answer(carried, step))

    def _answer(self, carried: Carried, step: int) -> None:
        kept = self._send(self._states(), carried.gradient(step=step))
        self._say({"step": step, "kept": kept})

    def refuse(self, problem: str) -> None:
        """Tells all who wait for a state why this worker cannot send its own: their `receive` ends with that."""
        self._despite_loss(lambda: self._say({"worker": self._worker_id, "problem": problem}))

    def _say(self, answer: dict[str, object]) -> None:
        self._send(self._answers, {"text": as_text(answer)})
        if self._requests.info().num_accumulated:  # otherwise nobody waits, as at the end of most runs
            with contextlib.suppress(DeadlineExceededError):  # another worker has answered at the same time
                self._requests.take_grad(1, timeout=0.0)

    def receive(self, timeout: float | None, is_new_enough: Callable[[int], bool]) -> Received:
        """Returns the state that was sent last, or asks for one and waits for it.

        Args:
            timeout: Seconds to wait for each answer. None: the client's timeout.
            is_new_enough: Whether the state of a step is of use.

        Raises:
            DeadlineExceededError: Nobody has answered, or each of several answers was too old when it had arrived.
            InvalidArgumentError: Another worker has answered that its state cannot be sent, and why.
            AbortedError, LostError, NotFoundError: Requests or answers were gone, and are there again. Try again unless
                the run itself is gone, too.
        """
        try:
            return self._receive(timeout, is_new_enough)
        except GONE:
            self._open()
            raise

    def _receive(self, timeout: float | None, is_new_enough: Callable[[int], bool]) -> Received:
        received = self._read(is_new_enough)
        if received is not None:
            return received
        try:
            for _ in range(_MOST_ANSWERS):
                said = max(self._answers.info().kept_steps, default=0)
                answered = self._ask()
                # Whoever has left since then was not asked any more, but has sent its state.
                received = self._read(is_new_enough)
                if received is not None:
                    return received
                with contextlib.suppress(OutOfRangeError):  # answered more than once
                    self._requests.read_average(answered + 1, timeout=timeout)
                received = self._read(is_new_enough)
                if received is not None:
                    return received
                self._check_problems(said)
        finally:
            self._withdraw()
        raise DeadlineExceededError(
            f"{_MOST_ANSWERS} states of other workers arrived too late, the last one of step {self.newest_step()}: "
            "more rounds had ended by then than the server keeps averages of. Start all workers with a larger "
            "keep_averages"
        )

    def _ask(self) -> int:
        """Makes a request, unless there is one of this worker; returns how often requests had been answered before."""
        answered = self._requests.info().global_step
        if self._worker_id not in self._requests.info().worker_ids:
            self._request(self._worker_id)
        return answered

    def _request(self, sender: str) -> None:
        self._requests.apply_grad({"request": np.float32(1)}, local_step=_NEVER_STALE, worker_id=sender)

    def _withdraw(self) -> None:
        """Takes back this worker's request if nobody has answered it: it would look as if the worker could not answer.

        Others who wait ask again.
        """
        # It may be answered just now, or gone with the server; what `receive` has to say matters more.
        with contextlib.suppress(GradserveError):
            if self._worker_id in self._requests.info().worker_ids:
                self._requests.take_grad(1, timeout=0.0)

    def newest_step(self) -> int:
        """Returns the step of the state that was sent last, -1 if there is none."""
        return self._despite_loss(lambda: next((int(each["step"]) for _, each in self._latest_answers()), -1))

    def _latest_answers(self, *, are_problems: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
        """Returns the answers that are kept, with their numbers, the latest first: only states, or only problems."""
        for number in reversed(self._answers.info().kept_steps):
            with contextlib.suppress(OutOfRangeError):  # replaced meanwhile
                answer = of_text(self._answers.read_average(number)["text"])
                if ("problem" in answer) is are_problems:
                    yield number, answer

    def _check_problems(self, said: int) -> None:
        """Raises what another worker has said since an answer, if it could not send its state."""
        for number, answer in self._latest_answers(are_problems=True):
            if number > said:
                raise InvalidArgumentError(
                    f"worker {answer['worker']!r} is training and cannot send its state: {answer['problem']}. To take "
                    "part all the same, begin from a checkpoint with start_step=...",
                    field="state",
                )

    def _read(self, is_new_enough: Callable[[int], bool]) -> Received | None:
        """Returns the state that was sent last; None if it is of no use, gone, or about to be replaced."""
        for _, text in self._latest_answers():
            if not is_new_enough(text["step"]):
                continue
            try:
                average = self._states().read_average(text["kept"], timeout=0.0)
            except (DeadlineExceededError, OutOfRangeError, *GONE):
                continue  # another worker has sent its state since, or it is gone
            arrived = Arrived.of(average)
            if is_new_enough(arrived.said["step"]):
                return Received(arrived.state, arrived.said["step"])
        return None

    def _states(self) -> GradientAccumulator:
        return self._accumulator("state", COMPONENTS, _STATES_KEPT_SECONDS)

    def _accumulator(
        self,
        purpose: str,
        components: dict[str, DenseSpec],
        idle_lease: float = _KEPT_SECONDS,
        *,
        keep_averages: int = 1,
        ends_when_lost: bool = False,
    ) -> GradientAccumulator:
        return self._client.gradient_accumulator(
            components,
            shared_name=f"{self._name}/{purpose}",
            container=self._container,
            idle_lease=idle_lease,
            keep_averages=keep_averages,
            ends_when_lost=ends_when_lost,
            durability="none",
            device="cpu",
            sharded=False,
        )

    def _send(self, accumulator: GradientAccumulator, values: object) -> int:
        """Makes values the newest average of an accumulator; returns its step."""
        return accumulator.push_pull(
            values, 1, local_step=_NEVER_STALE, worker_id=self._worker_id, one_per_worker=False, copy=False
        ).step
