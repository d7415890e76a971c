"""The handover of a state from a worker that is training to one that begins later."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    LostError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
)
from gradserve.results import DenseSpec
from gradserve.training.agreement import DAY_SECONDS, NEVER_STALE, PAUSE_SECONDS
from gradserve.training.state import COMPONENTS, TEXT, Arrived, Carried, State, as_text, of_text
from gradserve_protocol.lasting import lasting_thread

_T = TypeVar("_T")
GONE = (AbortedError, LostError, NotFoundError)
"""The errors of accumulators that a restart has lost, that somebody has deleted, or that nobody has used for long."""
ATTEMPTS = 4
"""The number of attempts if accumulators are gone: each of the three may say so once, and restarts are rare."""
_MOST_ANSWERS = 10
"""The number of answers for which a joining worker waits if each is too old on arrival."""
_ANSWERS_KEPT = 16
"""The number of answers kept: workers that answer at the same time may announce their states out of order."""
_STATES_KEPT_SECONDS = 3600.0
"""The idle lease of states, which take as much memory as a model with its optimizer."""
_ROLL_CALL_SECONDS = 5.0
"""The time for which a roll call waits: workers look for roll calls every quarter of a second, even while computing."""
_log = logging.getLogger(__name__)
CHECK_SECONDS = 0.25
"""The interval at which each worker looks for requests."""
PATIENCE_SECONDS = 3.0
"""The time that the worker named by the last round has to answer a request before others do."""
_CLOSING_SECONDS = 1.0
_SLICE_SECONDS = 1.0
"""The time for which the attendant waits for the state to rest before it looks for roll calls again."""


_ROLL_CALL, _PRESENT = "gradserve/roll-call/", "gradserve/present/"


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

    Workers that leave the run send their state, too, for workers that are late or join when all others have ended.

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
                # A worker that has left since then did not see the request, but has sent its state.
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
            "keep_averages",
            code="GS_CHECKPOINT_TOO_OLD",
        )

    def _ask(self) -> int:
        """Makes a request, unless there is one of this worker; returns how often requests had been answered before."""
        answered = self._requests.info().global_step
        if self._worker_id not in self._requests.info().worker_ids:
            self._request(self._worker_id)
        return answered

    def _request(self, sender: str) -> None:
        self._requests.apply_grad({"request": np.float32(1)}, local_step=NEVER_STALE, worker_id=sender)

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
            with contextlib.suppress(OutOfRangeError):  # replaced since
                answer = of_text(self._answers.read_average(number)["text"])
                if ("problem" in answer) is are_problems:
                    yield number, answer

    def _check_problems(self, said: int) -> None:
        """Raises what another worker has said since an answer, if it could not send its state."""
        for number, answer in self._latest_answers(are_problems=True):
            if number > said:
                raise InvalidArgumentError(
                    f"worker {answer['worker']!r} is training and cannot send its state: {answer['problem']}. To take "
                    "part anyway, begin from a checkpoint with start_step=...",
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
        idle_lease: float = DAY_SECONDS,
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
            values, 1, local_step=NEVER_STALE, worker_id=self._worker_id, one_per_worker=False, copy=False
        ).step


class Attendant:
    """Looks for requests from time to time, and answers them while the state of this worker rests.

    If a state cannot be sent, the newcomer gets the reason as an error. This worker logs it and goes on.

    All workers see a request. The one that answers is the first, by id, of those of the last round that do not wait for
    a state themselves. If it does not, because it has died or computes for long, others do.
    """

    def __init__(
        self,
        joining: Joining,
        worker_id: str,
        state: Callable[[], State | None],
        check_seconds: float = CHECK_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes where requests are, this worker's id and state, and times in seconds; `look` is called every time."""
        self._joining = joining
        self._worker_id = worker_id
        self._state = state
        self._check_seconds = check_seconds
        self._patience_seconds = patience_seconds
        self._look = look
        self._changed = threading.Condition()
        self._step: int | None = None
        """The step of the state while it rests, otherwise None."""
        self._members: Collection[str] = ()
        self._is_wanted = False
        """True while the state has to be copied before it changes again."""
        self._is_closed = False
        self._problem = ""
        """Why the state could not be sent the last time, as the log has it already."""
        self._thread = lasting_thread("answering workers that join", self._attend, _log, "gradserve-joining")

    @contextmanager
    def at_rest(self, step: int, members: Collection[str]) -> Iterator[None]:
        """Answers requests during a block, in which the state does not change.

        Args:
            step: The step that the state belongs to.
            members: The ids of the workers of the round that led to it.
        """
        with self._changed:
            self._step, self._members = step, members
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                try:
                    self._changed.wait_for(lambda: not self._is_wanted)
                finally:
                    self._step = None

    def use(self, joining: Joining) -> None:
        """Looks for requests elsewhere from now on: after a restart of the server."""
        self._joining = joining

    def close(self) -> None:
        """Ends the thread. If a call of it waits for a server that is gone, it ends with the client at the latest."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_SECONDS)

    def _attend(self) -> None:
        seen_at: float | None = None
        logged = ""
        while not self._is_closed:
            try:
                self._look()
                requesters = self._joining.requesters()
                now = time.monotonic()
                seen_at = (now if seen_at is None else seen_at) if requesters else None
                if seen_at is not None and self._is_called(requesters, now - seen_at) and self._answer():
                    seen_at = None
            except CallCancelledError:
                return  # the client is closed
            except GradserveError as error:
                if str(error) != logged:
                    _log.warning("workers that want to join could not be answered: %s", error)
                logged = str(error)
            else:
                logged = ""
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, self._check_seconds)

    def _is_called(self, requesters: Collection[str], waited: float) -> bool:
        if self._worker_id in requesters:
            return False
        able = sorted(set(self._members) - set(requesters))
        return able[:1] == [self._worker_id] or waited >= self._patience_seconds

    def _answer(self) -> bool:
        """Copies the state at the next rest, and sends it, or says why not; returns False if it is not at hand."""
        step, carried, problem = self._copied()
        if step is None or (carried is None and problem is None):
            return False
        if not self._joining.requesters():
            return True  # another worker was faster
        if carried is not None:
            try:
                self._joining.answer(carried, step)
            except (InvalidArgumentError, ResourceExhaustedError) as error:
                problem = error  # it would be the same the next time
        if problem is not None:
            self._say(problem)
        return True

    def _copied(self) -> tuple[int | None, Carried | None, Exception | None]:
        """Returns the step and a copy of the state at the next rest, or what was wrong with it."""
        with self._changed:
            self._is_wanted = True
            try:
                self._wait_for_rest()
                state = None if self._step is None else self._state()
                return self._step, None if state is None else Carried.of(state), None
            except Exception as error:  # of what the caller has written, and of what the state has in it
                return self._step, None, error
            finally:
                self._is_wanted = False
                self._changed.notify_all()

    def _wait_for_rest(self) -> None:
        """Waits until the state rests or the attendant is closed, and answers roll calls. Holds the lock."""
        while not self._changed.wait_for(lambda: self._is_closed or self._step is not None, _SLICE_SECONDS):
            self._changed.release()
            try:
                self._joining.requesters()
            except GradserveError:
                return
            finally:
                self._changed.acquire()

    def _say(self, problem: Exception) -> None:
        """Tells waiting workers, and the log once, why this worker cannot send its state, and goes on."""
        text = problem.message if isinstance(problem, GradserveError) else f"{type(problem).__qualname__}: {problem}"
        if text != self._problem:
            unknown = None if isinstance(problem, GradserveError) else problem
            _log.warning(
                "worker %r cannot send its state to workers that join: %s", self._worker_id, text, exc_info=unknown
            )
        self._problem = text
        self._joining.refuse(text)
