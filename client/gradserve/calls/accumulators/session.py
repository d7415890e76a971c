"""Accumulators and parameters as a client has opened them: what each needs to go on after a restart of the server.

A watch is over the contributions that they keep, however busy the program is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from gradserve.calls.accumulators.kept import KeptGradient, KeptGradients, KeptMemory, MakeRequest
from gradserve.calls.accumulators.service import ACCUMULATORS, Accepted, Info, RoundService, without_run
from gradserve.calls.exchange import Background, Operation, Pause, Reply, Unary
from gradserve.calls.identity import CallId
from gradserve.calls.retries import is_of_another_run
from gradserve.calls.tensors import call_with_arrays
from gradserve_protocol.arrays import AnyArray, Array
from gradserve_protocol.errors import (
    AbortedError,
    GradserveError,
    InvalidArgumentError,
    LostError,
    NotDurableError,
    NotFoundError,
)
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

_Key = tuple[str, ...]
_INTERVAL_SECONDS = 1.0
"""The pause of a watch before it asks again."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
"""The pauses of a client that waits until its gradients are durable."""
_PAUSE_SECONDS = 0.02
"""The pause before a call looks again whether another one has opened the accumulator again."""

Refusals: TypeAlias = tuple[type[GradserveError], ...]
_REFUSED: Refusals = (AbortedError, InvalidArgumentError)


class RoundSession:
    """An accumulator or parameters as a client has opened them, and what it would lose with the server.

    Safe to use from several threads.

    Every request names the run of the server that it is for, so another one refuses it. Then the resource is opened
    again, contributions that the restart has lost are sent again, and the request is made for the new run.

    Attributes:
        service: The service of the resource.
        ref: The resource's name, with its incarnation and the server's.
        epoch: The latest known epoch of a sharded accumulator at its home.
        kept: The contributions that are not durable yet; None if the client keeps none.
        is_private: Whether the resource ends with this client.
        ends_when_lost: Whether every call raises LostError once the server has lost the resource.
    """

    def __init__(
        self,
        info: Info,
        memory: KeptMemory,
        create: Callable[[], Operation[Info]] | None = None,
        keeping: Callable[[], Operation[None]] | None = None,
        *,
        service: RoundService = ACCUMULATORS,
        is_private: bool = False,
        ends_when_lost: bool = False,
    ) -> None:
        """Takes what the server said of it.

        Args:
            info: The description, of which only the name need be set.
            memory: The memory of kept contributions.
            create: Creates it again if it does not survive the server. None: the session ends with it.
            keeping: Called when a contribution is kept.
            service: The service of the resource.
            is_private: Whether it ends with this client.
            ends_when_lost: Whether no call is to reach a resource that was created again.
        """
        self.service = service
        self.is_private = is_private
        self.ends_when_lost = ends_when_lost
        self.ref = service.named(info)
        self.epoch = _epoch(info)
        self._create = create
        self._keeping = keeping
        self._lock = threading.Lock()
        self._is_reopening = False
        self._ended_runs: set[str] = set()
        """The runs of the server whose requests another run has refused."""
        self._loss: LostError | None = None
        self._end: LostError | None = None
        durability = info.spec.durability
        is_watched = bool(info.server_incarnation)
        self.kept: KeptGradients | None = None
        self._is_lost_with_server = is_watched and durability == accumulator_pb2.DURABILITY_NONE
        if is_watched and durability == accumulator_pb2.DURABILITY_ROUND:
            self.kept = KeptGradients(memory)
        self._step = service.step(info)
        self._round = 0
        self._num_accepted = 0

    @property
    def title(self) -> str:
        """The resource, as messages call it."""
        return f"{self.service.subject} '{self.ref.container}/{self.ref.name}'"

    def check(self) -> None:
        """Tells the program what was lost, once, and each time that the session has ended.

        Raises:
            LostError: A restart of the server has lost something, or the resource with which the session ends.
        """
        self.tell_loss()
        if self._end is not None:
            raise LostError(self._end.message, accumulator=self._end.accumulator, num_gradients=self._end.num_gradients)

    def tell_loss(self) -> None:
        """Tells the program what was lost, once.

        Raises:
            LostError: A restart of the server has lost something.
        """
        if self._loss is not None:
            with self._lock:
                loss, self._loss = self._loss, None
            if loss is not None:
                raise loss

    @property
    def notes_gradients(self) -> bool:
        """Returns True if `accepted` needs to know of contributions."""
        return self.kept is not None or self._is_lost_with_server

    def renew(self, request: Any) -> Operation[None]:
        """Makes a request one for the present run of the server, which has refused it as one for an earlier run.

        Raises:
            LostError: The restart has lost something.
            AbortedError: The run that has refused it was not started later: calls reach several servers in turn.
        """
        try:
            yield from self._renew(request)
        except NotFoundError:
            self.check()  # which says more
            raise
        self.check()

    def accepted(
        self,
        request: Any,
        answer: Accepted,
        again: MakeRequest,
        arrays: Sequence[AnyArray] | None,
    ) -> Operation[None]:
        """Notes a contribution that the server has accepted.

        Args:
            request: The request.
            answer: What the answer says.
            again: Makes the request again.
            arrays: The arrays of the contribution; None if the client does not have them all.
        """
        if self._is_lost_with_server:
            self._count(answer)
        elif self.kept is not None:
            server = self.service.ref(request).server_incarnation
            call = CallId(request.request_id.client_id, request.request_id.sequence)
            self.kept.accepted(call, answer, server, again, arrays)
            if len(self.kept) and self._keeping is not None:
                yield from self._keeping()

    def learned(self, request: Any, num_rounds: int, step: int | None = None) -> None:
        """Notes that so many rounds have ended, as the answer to a request says, and the step."""
        if self.kept is not None:
            self.kept.learned(self.service.ref(request).server_incarnation, num_rounds)
        if step is not None:
            with self._lock:
                self._step = step
                if num_rounds >= self._round:
                    self._num_accepted = 0

    def step_set(self, step: int) -> None:
        """Notes that the program has set the step."""
        self._step = step

    def ask(self, at_most: float = math.inf) -> Operation[None]:
        """Asks the server how many rounds have ended; before that, sends again what a restart has lost.

        A loss is not raised here, but by the next call of the program.

        Args:
            at_most: Seconds that the question may take.
        """
        kept = self.kept
        if kept is None:
            return
        if kept.accepted_elsewhere(self.ref.server_incarnation):
            yield from self._reopen_alone()
        service = self.service
        request = service.request(service.ask, self.ref)
        renewal = partial(self._renew, request)
        try:
            reply = yield Unary(service.name, service.ask.name, request, at_most=at_most, renewal=renewal)
        except NotFoundError:
            kept.forget()
        else:
            self.learned(request, service.num_ended(reply))

    def deleted(self) -> None:
        """Forgets what was kept, as this client has deleted the resource."""
        if self.kept is not None:
            self.kept.forget()

    # After a restart

    def _renew(self, request: Any) -> Operation[None]:
        """Opens the resource again unless another call has, and makes a request one for the new run."""
        ref = self.service.ref(request)
        self._ended_runs.add(ref.server_incarnation)
        while ref.server_incarnation == self.ref.server_incarnation:
            yield from self._reopen_alone()
        ref.CopyFrom(self.ref)

    def _reopen_alone(self) -> Operation[None]:
        """Opens the resource again; waits instead while another call does."""
        with self._lock:
            is_alone, self._is_reopening = not self._is_reopening, True
        if not is_alone:
            yield Pause(_PAUSE_SECONDS)
            return
        try:
            is_open = False
            while not is_open:
                try:
                    yield from self._reopen()
                except AbortedError as error:
                    if not is_of_another_run(error):
                        raise
                else:
                    is_open = True
        finally:
            self._is_reopening = False

    def _reopen(self) -> Operation[None]:
        if self._is_lost_with_server and self._create is not None:
            info = yield from self._create()
        else:
            try:
                info = yield from self.service.described(without_run(self.ref))
            except NotFoundError as error:
                if not self._is_lost_with_server and _is_replaced(error):
                    self._end_replaced()
                if self.kept is not None and (num_lost := self.kept.forget()):
                    self._lose(
                        num_lost,
                        f"{self.title} is gone since the server was started again, and {self._accepted(num_lost)} with "
                        "it",
                    )
                elif self._is_lost_with_server and self.ref.incarnation:
                    self._end_lost()
                raise
        ref = self.service.named(info)
        if ref.server_incarnation in self._ended_runs:
            raise AbortedError(
                f"expected one server, or a list of all servers of a cluster, got an address that leads to different "
                f"servers, as behind a load balancer: a run of the server that had ended for {self.title} has "
                f"answered again. All calls have to reach the same server",
                code="GS_SEVERAL_SERVERS",
            )
        if self.kept is not None:
            num_lost, reason = yield from self._send_again(self.kept, ref)
            if num_lost:
                self._lose(
                    num_lost,
                    f"the server was started again, and has lost {self._accepted(num_lost)} for "
                    f"{self.title}, which cannot be sent again: {reason}",
                )
        elif ref.incarnation != self.ref.incarnation:
            self._lose_all(info)
        self.ref, self.epoch = ref, _epoch(info)

    def _send_again(self, kept: KeptGradients, ref: Any) -> Operation[tuple[int, str]]:
        """Sends contributions that a run of the server has lost to another one.

        Returns:
            How many cannot be sent, and why.
        """
        num_lost, reason = 0, ""
        for each in kept.accepted_elsewhere(ref.server_incarnation):
            if each.request is None or each.arrays is None:
                why = "they are tensors of the server, or more than GRADSERVE_KEPT_BYTES allows to keep"
            else:
                try:
                    reply = yield from self._send(each.request, each.arrays, ref)
                except _REFUSED as error:
                    if is_of_another_run(error):
                        self._ended_runs.add(ref.server_incarnation)
                        raise
                    why = error.message
                else:
                    if reply.message.outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
                        kept.again(each, self.service.accepted(reply.message), ref.server_incarnation)
                        continue
                    why = f"another {self.service.contribution} of the worker is in the round"
            num_lost, reason = num_lost + kept.forget([each]), why
        return num_lost, reason

    def _send(self, request: MakeRequest, arrays: Sequence[Array], ref: Any) -> Operation[Reply]:
        def again(tensors: Sequence[tensor_pb2.Tensor]) -> Any:
            message = request(tensors)
            self.service.ref(message).CopyFrom(ref)
            message.accepted_before = True
            return message

        return call_with_arrays(self.service.name, self.service.apply.name, arrays, again, released=True)

    def _end_lost(self) -> None:
        """Ends the session, as the server did not keep the resource, and this client cannot create it again."""
        message = (
            f"the server was started again, and has lost {self.title} at step {self._step}, as durability 'none' says: "
            "a new call to the client's method that made this object creates a new one"
        )
        self._end = LostError(message, accumulator=self.ref.name, num_gradients=self._num_accepted)

    def _end_replaced(self) -> None:
        """Ends the session, as the state of the server is not the one that it had."""
        message = (
            f"the server was started again, and what is there as {self.title} is not what this program had opened: the "
            "state was restored from a backup, or another program has deleted it and created it again. A new call to "
            "the client's method that made this object opens what is there now"
        )
        self._end = LostError(message, accumulator=self.ref.name, num_gradients=0)

    def _lose_all(self, info: Info) -> None:
        """Notes what was lost with a resource that the server did not keep."""
        num_lost, step = self._num_accepted, self._step
        self._num_accepted, self._round, self._step = 0, 0, self.service.step(info)
        message = (
            f"the server was started again, and has lost {self.title}, whose durability is none: "
            f"its step, {step}, its averages, and since that step {self._accepted(num_lost)}; it has been created again"
        )
        if num_lost or step:
            self._lose(num_lost, message)
        if self.ends_when_lost and self._end is None:
            self._end = LostError(message, accumulator=self.ref.name, num_gradients=num_lost)

    def _lose(self, num_gradients: int, message: str) -> None:
        with self._lock:
            earlier = 0 if self._loss is None else self._loss.num_gradients
            self._loss = LostError(message, accumulator=self.ref.name, num_gradients=earlier + num_gradients)

    def _count(self, answer: Accepted) -> None:
        with self._lock:
            if answer.round != self._round:
                self._round, self._num_accepted = answer.round, 0
            self._num_accepted += answer.round > answer.num_rounds
            self._step = answer.step

    def _accepted(self, number: int) -> str:
        return f"{self.service.counted(number)} that it had accepted from this client"


def _epoch(info: Info) -> int:
    return info.epoch if isinstance(info, accumulator_pb2.AccumulatorInfo) else 0


class Watch:
    """The accumulators and parameters of one client, and a background operation that asks about what it keeps for long.

    So a contribution that a restart has lost is sent again while the program computes, or waits for something else, and
    memory of rounds that others have ended is released. Of rounds that take less than a second, it never asks.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[_Key, RoundSession] = {}
        self._is_watching = False

    def session(self, ref: accumulator_pb2.AccumulatorRef) -> RoundSession | None:
        """Returns the session of an accumulator that the client has opened, by its name and incarnation."""
        return self._sessions.get(_key(ACCUMULATORS, ref)) if ref.incarnation else None

    def add(self, session: RoundSession) -> RoundSession:
        """Adds a session; returns it, or the one that there is already."""
        key = _key(session.service, session.ref)
        if session.ends_when_lost:
            key += (str(id(session)),)  # each of them ends by itself
        with self._lock:
            return self._sessions.setdefault(key, session)

    def remove(self, container: str, name: str, service: RoundService = ACCUMULATORS) -> None:
        """Removes a resource of a service that was deleted."""
        with self._lock:
            keys = [key for key in self._sessions if key[:3] == (service.name, container, name)]
            gone = [self._sessions.pop(key) for key in keys]
        for session in gone:
            session.deleted()

    def check(self) -> None:
        """Tells the program what was lost of any resource, once.

        Raises:
            LostError: A restart of the server has lost something.
        """
        for each in list(self._sessions.values()):
            each.tell_loss()

    def begin(self) -> Operation[None]:
        """Begins to watch, unless that has begun."""
        with self._lock:
            if self._is_watching:
                return
            self._is_watching = True
        yield Background(self._watch)

    @property
    def keeping(self) -> list[RoundSession]:
        """The resources of which contributions are kept."""
        with self._lock:
            return [each for each in self._sessions.values() if each.kept]

    def _watch(self) -> Operation[None]:
        try:
            while oldest := self._oldest():
                yield Pause(_INTERVAL_SECONDS)
                for session, gradient in oldest.items():
                    if session.kept is not None and session.kept.oldest is gradient:
                        yield from _asked(session)
        finally:
            with self._lock:
                self._is_watching = False

    def _oldest(self) -> dict[RoundSession, KeptGradient]:
        with self._lock:
            found = {each: each.kept.oldest for each in self._sessions.values() if each.kept}
            kept = {session: gradient for session, gradient in found.items() if gradient is not None}
            # Under the lock: for a gradient that is kept later, another watch begins.
            self._is_watching = bool(kept)
            return kept


def _asked(session: RoundSession) -> Operation[None]:
    try:
        yield from session.ask()
    except GradserveError:
        return  # it is asked again, and the program's own calls say what is wrong


def _is_replaced(error: NotFoundError) -> bool:
    """Returns True if a resource of the name exists, with another incarnation."""
    return (error.field or "").endswith(".incarnation")


def _key(service: RoundService, ref: Any) -> _Key:
    return service.name, ref.container, ref.name, ref.incarnation


def settle(watch: Watch, seconds: float, clock: Callable[[], float]) -> Operation[None]:
    """Waits until nothing is kept of resources that outlive the client; then forgets it in any case.

    Args:
        watch: The client's accumulators and parameters.
        seconds: How long to wait at most; 0 asks nothing.
        clock: A monotonic clock, in seconds.

    Raises:
        NotDurableError: The time is over, or the server cannot be reached.
        LostError: A restart has lost something that the program has not been told.
    """
    end, left, pause = clock() + seconds, seconds, _FIRST_PAUSE_SECONDS
    while (sessions := _outliving(watch)) and left > 0:
        for session in sessions:
            try:
                yield from session.ask(at_most=left)
            except GradserveError:
                left = 0.0
            left = max(min(left, end - clock()), 0.0)
        if left > 0 and _outliving(watch):
            pause = min(pause, left)
            yield Pause(pause)
            left, pause = min(left - pause, end - clock()), min(2 * pause, _LONGEST_PAUSE_SECONDS)
    error = not_durable(watch, seconds)
    for session in sessions:
        session.deleted()
    watch.check()
    if error is not None:
        raise error


def not_durable(watch: Watch, seconds: float) -> NotDurableError | None:
    """Returns the error that names what is not durable after some seconds; None if nothing is kept."""
    outliving = _outliving(watch)
    if not outliving:
        return None
    counts = [(each, len(each.kept or ())) for each in outliving]
    gradients = {each.ref.name: count for each, count in counts}
    what = ", ".join(f"{count} of {each.service.subject} {each.ref.name!r}" for each, count in counts)
    words = " and ".join(dict.fromkeys(f"{each.service.contribution}s" for each in outliving))
    return NotDurableError(
        f"the client was closed after {seconds:g} s, and of its {words} that the server has accepted, {what} are in "
        "rounds that have not ended, which a crash of the server would lose",
        gradients=gradients,
    )


def _outliving(watch: Watch) -> list[RoundSession]:
    return [each for each in watch.keeping if not each.is_private]
