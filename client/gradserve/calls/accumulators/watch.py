"""Watches over the gradients that a client keeps, however busy the program is."""

import threading

from gradserve.calls.accumulators.kept import KeptGradient
from gradserve.calls.accumulators.session import AccumulatorSession
from gradserve.calls.exchange import Background, Operation, Pause
from gradserve_protocol.errors import GradserveError, NotDurableError
from gradserve_protocol.v1 import accumulator_pb2

_INTERVAL_SECONDS = 1.0
_Key = tuple[str, ...]
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5


class Watch:
    """The accumulators of one client, and a background operation that asks about gradients kept for long.

    So a gradient that a restart has lost is sent again while the program computes, or waits for something else, and
    memory of rounds that others have ended is released. Of rounds that take less than a second, it never asks.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[_Key, AccumulatorSession] = {}
        self._is_watching = False

    def session(self, ref: accumulator_pb2.AccumulatorRef) -> AccumulatorSession | None:
        """Returns the session of an accumulator that the client has opened, by its name and incarnation."""
        return self._sessions.get(_key(ref)) if ref.incarnation else None

    def add(self, session: AccumulatorSession) -> AccumulatorSession:
        """Adds a session; returns it, or the one that there is already."""
        key = _key(session.ref)
        if session.ends_when_lost:
            key += (str(id(session)),)  # each of them ends by itself
        with self._lock:
            return self._sessions.setdefault(key, session)

    def remove(self, container: str, name: str) -> None:
        """Removes an accumulator that was deleted."""
        with self._lock:
            keys = [key for key in self._sessions if key[:2] == (container, name)]
            gone = [self._sessions.pop(key) for key in keys]
        for session in gone:
            session.deleted()

    def check(self) -> None:
        """Tells the program what was lost of any accumulator, once.

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
    def keeping(self) -> list[AccumulatorSession]:
        """The accumulators of which gradients are kept."""
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

    def _oldest(self) -> dict[AccumulatorSession, KeptGradient]:
        with self._lock:
            found = {each: each.kept.oldest for each in self._sessions.values() if each.kept}
            kept = {session: gradient for session, gradient in found.items() if gradient is not None}
            # Under the lock: for a gradient that is kept later, another watch begins.
            self._is_watching = bool(kept)
            return kept


def _asked(session: AccumulatorSession) -> Operation[None]:
    try:
        yield from session.ask()
    except GradserveError:
        return  # it is asked again, and the program's own calls say what is wrong


def _key(ref: accumulator_pb2.AccumulatorRef) -> _Key:
    return ref.container, ref.name, ref.incarnation


def settle(watch: Watch, seconds: float) -> Operation[None]:
    """Waits until no gradient is kept of accumulators that outlive the client; then forgets them in any case.

    Args:
        watch: The client's accumulators.
        seconds: How long to wait at most; 0 asks nothing.

    Raises:
        NotDurableError: The time is over, or the server cannot be reached.
        LostError: A restart has lost something that the program has not been told.
    """
    left, pause = seconds, _FIRST_PAUSE_SECONDS
    while (sessions := _outliving(watch)) and left > 0:
        for session in sessions:
            try:
                yield from session.ask(at_most=left)
            except GradserveError:
                left = 0.0
        if left > 0 and _outliving(watch):
            pause = min(pause, left)
            yield Pause(pause)
            left, pause = left - pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
    error = not_durable(watch, seconds)
    for session in sessions:
        session.deleted()
    watch.check()
    if error is not None:
        raise error


def not_durable(watch: Watch, seconds: float) -> NotDurableError | None:
    """Returns the error that names what is not durable after some seconds; None if nothing is kept."""
    gradients = {each.ref.name: len(each.kept or ()) for each in _outliving(watch)}
    if not gradients:
        return None
    what = ", ".join(f"{count} of accumulator {name!r}" for name, count in gradients.items())
    return NotDurableError(
        f"the client was closed after {seconds:g} s, and of its gradients that the server has accepted, {what} are in "
        "rounds that have not ended, which a crash of the server would lose",
        gradients=gradients,
    )


def _outliving(watch: Watch) -> list[AccumulatorSession]:
    return [each for each in watch.keeping if not each.is_private]
