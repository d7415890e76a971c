"""Retries exchanges while the server is unavailable."""

import itertools
import math
import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from gradserve.calls.exchange import (
    Background,
    Download,
    Introduce,
    Local,
    Operation,
    Pause,
    Repeat,
    TimeLimits,
    Together,
    Unary,
    Upload,
    Whole,
)
from gradserve.workers import has_all_patience
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import WithContents
from gradserve_protocol.variables import RESTART_PATIENCE_VARIABLE

_FIELDS = ("accumulator.server_incarnation", "parameters.server_incarnation")
T = TypeVar("T")
_Failure: TypeAlias = UnavailableError | ResourceExhaustedError | AbortedError | UnauthenticatedError
"""An error after which an exchange may be repeated."""
_Sent: TypeAlias = Unary | Whole | Upload | Download
_WITHOUT_REPLY = (GeneratorExit, CallCancelledError, DeadlineExceededError, InternalError, UnavailableError)
"""The ends of an attempt after which nobody knows what the server has stored for it."""
_NEVER_REPEATED = Pause | Background | Together | Local


def is_of_another_run(error: GradserveError) -> bool:
    """Returns True if a server refused a call because it was for an earlier run of it."""
    return error.field in _FIELDS


@dataclass(frozen=True)
class RetryPolicy:
    """The pauses between attempts of an exchange.

    Attributes:
        pauses: Seconds between attempts; there is one attempt more than pauses.
        restart_patience: The seconds of pauses, if that is more, for a server that may be starting: one that has
            answered before, or at whose address nobody listens.
        is_patience_given: Whether the user has chosen that: then calls with all patience have no more either.
        restart_pause: The length of those further pauses. A refused attempt costs next to nothing, and a long pause
            after it would keep workers waiting for a server that is back.
        jitter: The fraction by which a pause is shortened or lengthened at random, so that not all clients call at once
            when a server comes back.
    """

    pauses: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    restart_patience: float = 15.0
    is_patience_given: bool = False
    restart_pause: float = 0.4
    jitter: float = 0.2

    @classmethod
    def wanted(cls, environment: Mapping[str, str]) -> Self:
        """Returns the policy with the patience that GRADSERVE_RESTART_PATIENCE says.

        Raises:
            InvalidArgumentError: That is no number of seconds.
        """
        text = environment.get(RESTART_PATIENCE_VARIABLE)
        if not text:
            return cls()
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise Argument(RESTART_PATIENCE_VARIABLE).error("a number of seconds", text)
        return cls(restart_patience=seconds, is_patience_given=True)

    @property
    def patience(self) -> float:
        """The seconds of pauses for a server that may be starting; inf in a block of `with_all_patience`."""
        return math.inf if has_all_patience() and not self.is_patience_given else self.restart_patience

    def pauses_now(self, may_be_starting: Callable[[], bool]) -> Iterator[float]:
        """Yields the pauses of one exchange, each with random jitter.

        Args:
            may_be_starting: Returns True as long as the server may be starting.
        """
        further: Iterable[float]
        if self.patience == math.inf:
            further = itertools.repeat(self.restart_pause)
        else:
            further = [self.restart_pause] * math.ceil((self.patience - sum(self.pauses)) / self.restart_pause)
        for number, pause in enumerate(itertools.chain(self.pauses, further)):
            if number >= len(self.pauses) and not may_be_starting():
                return
            yield pause * random.uniform(1 - self.jitter, 1 + self.jitter)


def _keep_until_their_lease(_target: int, _receipt: bytes) -> None:
    """Does nothing: what calls without a reply have stored ends with its lease."""


class Contact:
    """A client's knowledge of its server.

    Attributes:
        is_made: Whether the server has ever answered: it exists, and its address is right.
        lose: Called with the target and the receipt of a call whose reply has not arrived. The server may have stored
            tensors for it.
    """

    __slots__ = ("is_made", "lose")

    def __init__(self, lose: Callable[[int, bytes], None] = _keep_until_their_lease) -> None:
        self.is_made = False
        self.lose = lose


class Attempt(NamedTuple):
    """One attempt of an exchange, which may take `timeout` seconds; None for no limit.

    Attributes:
        exchange: The exchange.
        timeout: Its time limit.
        metadata: What the call carries beside its request.
    """

    exchange: _Sent | Introduce
    timeout: float | None
    metadata: Metadata = ()


Step: TypeAlias = Attempt | Pause | Background | Together | Local
Attempts: TypeAlias = Generator[Step, Any, T]


def with_retries(
    operation: Operation[T],
    times: TimeLimits,
    policy: RetryPolicy,
    clock: Callable[[], float],
    contact: Contact,
) -> Attempts[T]:
    """Carries out an operation, and repeats exchanges that end with UnavailableError.

    An exchange that another run of the server has refused is renewed and repeated, too, one that the server has
    refused because of a limit after the time that it has named, and one whose caller it did not know after an
    introduction.

    Every exchange may be sent twice, because calls that must count once have an id and a broken upload leaves nothing.
    Only what reads a tensor for the last time is not repeated once it was sent: a download, a call that says so. What
    an attempt without a reply has stored on the server is deleted with its receipt.

    Args:
        operation: The operation.
        times: The time limits; attempts and pauses together have the time limit of one exchange.
        policy: The pauses between attempts.
        clock: A monotonic clock, in seconds.
        contact: What the client knows of its server.

    Returns:
        The result of the operation.

    Raises:
        UnavailableError: No attempt was answered; the message has the first attempt's reason, and the last one's.
        GradserveError: What the operation raises.
    """
    try:
        exchange = next(operation)
        while True:
            try:
                if isinstance(exchange, _NEVER_REPEATED):
                    answer = yield exchange
                else:
                    left = exchange.time_limit(times)
                    end = clock() + left
                    failure: _Failure | None = None
                    try:
                        answer = yield Attempt(exchange, None if left == math.inf else left)
                    except UnavailableError as error:
                        failure = error
                    except _WITHOUT_REPLY as error:
                        _lose(_lost_receipts(exchange, error, is_late=clock() >= end), exchange, contact)
                        raise
                    except ResourceExhaustedError as error:
                        if error.retry_after is None or not is_repeatable(exchange, error):
                            raise
                        failure = error
                    except AbortedError as error:
                        if _renewal_after(exchange, error) is None:
                            raise
                        failure = error
                    except UnauthenticatedError as error:
                        failure = error
                    if failure is not None:
                        further = _FurtherAttempts(exchange, times, policy, clock, contact)
                        answer = yield from further.after(failure, end)
                    contact.is_made = True
            except GradserveError as error:
                exchange = operation.throw(error)
            else:
                exchange = operation.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        operation.close()


class _FurtherAttempts:
    """The attempts of an exchange whose first one has failed."""

    def __init__(
        self,
        exchange: _Sent,
        times: TimeLimits,
        policy: RetryPolicy,
        clock: Callable[[], float],
        contact: Contact,
    ) -> None:
        self._exchange = exchange
        self._times = times
        self._policy = policy
        self._clock = clock
        self._contact = contact
        self._latest: _Failure | None = None
        self._pauses = policy.pauses_now(self._may_be_starting)

    def after(self, failure: _Failure, end: float) -> Attempts[Any]:
        """Repeats the exchange until it is answered or the time is over."""
        lost: list[bytes] = []
        try:
            return (yield from self._repeated(failure, end, lost))
        finally:
            _lose(lost, self._exchange, self._contact)  # now, as the server may be there again

    def _repeated(self, failure: _Failure, end: float, lost: list[bytes]) -> Attempts[Any]:
        failures: list[UnavailableError] = []
        while True:
            self._latest = failure
            lost += _lost_receipts(self._exchange, failure)
            if isinstance(failure, UnavailableError):
                failures.append(failure)
                may_be_sent = is_repeatable(self._exchange, failure)
                pause = next(self._pauses, None) if may_be_sent else None
                if pause is None or end - self._clock() - pause <= 0:
                    error = _unavailable(failures)
                    if may_be_sent and (limit := self._limit(is_patience=pause is None)):
                        error.add_note(limit)
                    raise error from None
                yield Pause(pause)
            elif isinstance(failure, ResourceExhaustedError):
                pause = (failure.retry_after or 0.0) * random.uniform(1, 1 + self._policy.jitter)
                if end - self._clock() - pause <= 0:
                    raise failure from None
                yield Pause(pause)
            elif isinstance(failure, UnauthenticatedError):
                try:
                    yield from self._introduction(failure, end)
                except UnavailableError as error:
                    failure = error
                    continue
                except UnauthenticatedError as error:
                    _note(error, failures)
                    raise
            elif renewal := _renewal_after(self._exchange, failure):
                self._contact.is_made = True
                yield from with_retries(renewal(), self._times, self._policy, self._clock, self._contact)
            left = max(end - self._clock(), 0.0)
            try:
                return (yield Attempt(self._exchange, None if left == math.inf else left))
            except UnavailableError as error:
                failure = error
            except _WITHOUT_REPLY as error:
                lost += _lost_receipts(self._exchange, error, is_late=self._clock() >= end)
                if isinstance(error, GradserveError):
                    _note(error, failures)
                raise
            except UnauthenticatedError as error:
                if isinstance(failure, UnauthenticatedError):  # in spite of an introduction
                    _note(error, failures)
                    raise
                failure = error
            except GradserveError as error:
                if isinstance(error, ResourceExhaustedError) and error.retry_after is not None:
                    failure = error
                    continue
                if isinstance(error, AbortedError) and _renewal_after(self._exchange, error):
                    failure = error
                    continue
                _note(error, failures)
                raise

    def _limit(self, *, is_patience: bool) -> str:
        """Returns what has ended the attempts, the patience or the time limit; "" if more would have been of no use."""
        if not is_patience:
            seconds = self._exchange.time_limit(self._times)
            return f"The client tried again until the time limit of the call was over, {seconds:g} s (timeout)."
        if not self._may_be_starting() or self._policy.patience <= sum(self._policy.pauses):
            return ""
        return (
            f"The client tried again for {self._policy.patience:g} s, in case the server is starting; the environment "
            f"variable {RESTART_PATIENCE_VARIABLE} says for how many seconds."
        )

    def _may_be_starting(self) -> bool:
        return self._contact.is_made or (isinstance(self._latest, UnavailableError) and self._latest.may_pass)

    def _introduction(self, failure: UnauthenticatedError, end: float) -> Attempts[None]:
        """Tells the server who the caller is."""
        left = max(end - self._clock(), 0.0)
        why_not = yield Attempt(Introduce(self._exchange.target), None if left == math.inf else left)
        if why_not is None:
            return
        if why_not:
            raise UnauthenticatedError(
                f"{failure.message}; without a token, users are known only where they share memory with the server "
                f"({why_not})",
                code=failure.code,
            ) from None
        raise failure from None


def _renewal_after(exchange: _Sent, error: AbortedError) -> Callable[[], Operation[None]] | None:
    """Returns what makes an exchange one for the present run of the server, if that has refused it for an earlier."""
    if not is_of_another_run(error):
        return None
    match exchange:
        case Unary():
            return exchange.renewal
        case Whole(call):
            return call.renewal
    return None


def new_receipt() -> bytes:
    """Returns a name, which nobody can guess, for what a call stores.

    A reply may be on its way when its call is cancelled or its connection ends, so that nobody learns of the handles in
    it. With the receipt, the client has the server delete them.
    """
    return os.urandom(16)


def take_receipt(exchange: Any) -> bytes:
    """Returns the receipt of an exchange that was sent, and gives it another one for its next attempt.

    Empty if what the exchange stores has no receipt.
    """
    match exchange:
        case Upload(header=header):
            return renew_receipt(header)
        case Whole(call):
            return take_receipt(call)
        case Unary(request=request):
            return renew_receipt(request.message if isinstance(request, WithContents) else request)
    return b""


def renew_receipt(message: Any) -> bytes:
    """Gives a request another receipt, if it has one; returns the one before."""
    fields = message.DESCRIPTOR.fields_by_name
    place = message.placement if "placement" in fields else message if "receipt" in fields else None
    if place is None or not place.receipt:
        return b""
    receipt: bytes = place.receipt
    place.receipt = new_receipt()
    return receipt


def _lost_receipts(exchange: _Sent, error: BaseException, *, is_late: bool = True) -> list[bytes]:
    """Returns the receipt of an attempt, if what it has stored is unknown; the next attempt has another one.

    Args:
        exchange: The exchange.
        error: The end of the attempt.
        is_late: Whether the client's own time limit has passed: before that, a DeadlineExceededError is a reply.
    """
    if not isinstance(error, _WITHOUT_REPLY) or (isinstance(error, DeadlineExceededError) and not is_late):
        return []
    receipt = take_receipt(exchange)
    return [receipt] if receipt else []


def _lose(receipts: list[bytes], exchange: _Sent, contact: Contact) -> None:
    for each in receipts:
        contact.lose(exchange.target, each)


def _note(error: GradserveError, failures: list[UnavailableError]) -> None:
    """Adds the first failure to another error."""
    if failures:
        error.add_note(f"an earlier attempt failed: {failures[0]}")


def is_repeatable(exchange: _Sent, error: GradserveError) -> bool:
    """Returns True if an exchange may be made again after an error."""
    repeat = exchange.repeat if isinstance(exchange, Whole | Download) else Repeat.ALWAYS
    was_sent = not isinstance(error, UnavailableError) or error.was_sent
    return repeat is Repeat.ALWAYS or (repeat is Repeat.UNTIL_SENT and not was_sent)


def _unavailable(failures: list[UnavailableError]) -> UnavailableError:
    first, last = failures[0], failures[-1]
    if _reason(first) == _reason(last):
        return first
    message = f"{first.message} ({len(failures)} attempts; the last one failed with: {last.message})"
    return UnavailableError(message, field=first.field, code=first.code)


def _reason(error: UnavailableError) -> str:
    """Returns the reason without gRPC's words in parentheses, which name another address of the host each time."""
    return error.message.partition(" (")[0]
