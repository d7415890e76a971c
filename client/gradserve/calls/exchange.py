"""Exchanges: the requests, streams and pauses that operations yield.

The exchanges of every small call are named tuples, which are created three times as fast as frozen dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gradserve.conversion.plain import as_number
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import Array, DType
from gradserve_protocol.errors import GradserveError, InvalidArgumentError
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import tensor_messages_pb2

Told: TypeAlias = Callable[[int, int], object] | Literal[True]
"""The receiver of progress reports: a callback, or a line on a terminal."""


class CallbackError(GradserveError):
    """The end of a call whose callback has raised an exception, until a face raises that in its place.

    Attributes:
        error: That exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the callback of the progress failed: {error!r}")
        self.error = error

    def raise_error(self) -> NoReturn:
        """Raises the exception of the callback, which then refers to nothing of the call."""
        error, context, traceback = self.error, self.error.__context__, self.error.__traceback__
        del self.error
        self.__context__ = None
        try:
            raise error.with_traceback(traceback and traceback.tb_next)  # without the frame that called the callback
        finally:
            error.__context__ = context  # not this one
            del error, context, traceback  # or they are a cycle


class Progress(Protocol):
    """Counts the bytes of a transfer, and tells the caller from time to time.

    A context manager, for the time of the call. If the callback raises an exception, so does what tells it.

    Attributes:
        failure: The error that ends the call, if the callback has raised an exception.
    """

    failure: CallbackError | None

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def sends(self, num_bytes: int, /) -> None:
        """Tells the caller how many bytes the call sends.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def receives(self, num_bytes: int, /) -> None:
        """Tells the caller how many bytes the call receives, after those that it sends. Only the first time counts.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def begin(self, overhead: int = 0, /) -> None:
        """Notes that the transfer begins, or begins again; the first `overhead` bytes that are moved do not count."""
        ...

    def moved(self, num_bytes: int, /) -> None:
        """Adds bytes that were moved.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def add(self, num_bytes: int, /) -> bool:
        """Adds bytes that were moved; returns True if it is time for `tell`. Both are `moved`, where threads differ.

        Raises:
            CallbackError: The callback has raised an exception before.
        """
        ...

    def tell(self) -> None:
        """Tells the caller how many bytes were moved.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def end(self) -> None:
        """Tells the caller that all was moved. Can be called again.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...


DEFAULT_TIMEOUT_SECONDS = 60.0
T = TypeVar("T")
_LONGEST_SECONDS = 315_576_000_000


@dataclass(frozen=True)
class TimeLimits:
    """The time limits of a client's calls, in seconds.

    Attributes:
        call: The client's timeout, math.inf for none: of a call, and of a wait without a timeout of its own.
        reply: The time for an answer to arrive after the server has ended a wait whose time is up.
        closing: The time that a client on closing waits for a silent server. Its private resources end without it,
            somewhat later.
        slowest_bytes_per_second: A network speed. Streams may take as long as a call, and the time that a network of
            this speed needs for the payload.
    """

    call: float = DEFAULT_TIMEOUT_SECONDS
    reply: float = 5.0
    closing: float = 10.0
    slowest_bytes_per_second: float = 1e6

    def wait(self, seconds: float) -> float:
        """Returns the limit of a call in which the server may wait on purpose; 0 s: it does not wait."""
        return seconds + self.reply if seconds else self.call

    def stream(self, num_bytes: int) -> float:
        """Returns the limit of a stream with a payload of this size."""
        return self.call + self.transfer(num_bytes)

    def transfer(self, num_bytes: int) -> float:
        """Returns the time that a payload of this size takes on a slow network."""
        return num_bytes / self.slowest_bytes_per_second


class Unary(NamedTuple):
    """One request and one response, which is the answer.

    Attributes:
        service: The name of the service, without its package.
        method: The name of the method.
        request: The request.
        wait: Seconds that the server may wait on purpose; math.inf for ever. 0: the client's timeout applies.
        at_most: An upper limit in seconds, whatever the client's timeout.
        target: The server's index among those of the transport.
        in_place: Whether arrays of the reply may be read-only memory that the server shares with other readers.
        renewal: Makes the request one for the present run of the server, after that has refused it as one for an
            earlier run; None: such a refusal is an error like others.
        only_over_grpc: Whether no socket carries it, which it would occupy for as long as the client lives.
    """

    service: str
    method: str
    request: Message | WithContents
    wait: float = 0.0
    at_most: float = math.inf
    target: int = 0
    in_place: bool = False
    renewal: Callable[[], Operation[None]] | None = None
    only_over_grpc: bool = False

    def time_limit(self, times: TimeLimits) -> float:
        """Returns the time limit in seconds."""
        limit = times.wait(self.wait)
        return limit if limit < self.at_most else self.at_most


class NotCarried(Enum):
    """The type of NOT_CARRIED."""

    NOT_CARRIED = "not carried"


NOT_CARRIED: Final = NotCarried.NOT_CARRIED
"""The answer to a `Whole` that only gRPC could carry, but must not."""


class Repeat(Enum):
    """The condition on which the client makes a call without an answer again by itself."""

    ALWAYS = "none: it counts once, or changes nothing"
    UNTIL_SENT = "it could not be sent: it must not be carried out twice"
    NEVER = "it is never made again"

    @classmethod
    def of_read(cls, *, releases: bool) -> Self:
        """Returns what holds for a call that reads stored tensors, and then deletes them if it `releases` them."""
        return cls.UNTIL_SENT if releases else cls.ALWAYS


class Whole(NamedTuple):
    """A call whose tensors are in its request and response, answered by a `Reply` or NOT_CARRIED.

    Attributes:
        call: The call.
        over_grpc: Whether gRPC may carry it. If not, since gRPC has a stream for it, the answer is NOT_CARRIED where
            there is no socket.
        num_bytes: The known size of its tensors.
        repeat: The condition on which it is made again without an answer.
        progress: Told how many bytes of its tensors were moved.
        reply_bytes: The size of the tensors of its response, if its time limit has to allow for them.
    """

    call: Unary
    over_grpc: bool = True
    num_bytes: int = 0
    repeat: Repeat = Repeat.ALWAYS
    progress: Progress | None = None
    reply_bytes: int = 0

    @property
    def target(self) -> int:
        """The server's index among those of the transport."""
        return self.call.target

    def time_limit(self, times: TimeLimits) -> float:
        """Returns the time limit in seconds; a call in place of a stream has the stream's time too."""
        limit = self.call.time_limit(times)
        if self.reply_bytes:
            limit += times.transfer(self.reply_bytes)
        return limit if self.over_grpc else limit + times.transfer(self.num_bytes)


class Reply(NamedTuple):
    """The response to a call with tensors.

    Attributes:
        message: The response.
        arrays: The tensors beside it, by `payload_offset`, as new arrays.
    """

    message: Any
    arrays: Mapping[int, Array] = MappingProxyType({})


@dataclass(frozen=True)
class Upload:
    """A PutTensors stream, answered by the response.

    Attributes:
        header: The header that precedes the payload.
        arrays: The payload.
        target: The server's index among those of the transport.
        progress: Told how many bytes were moved.
    """

    header: tensor_messages_pb2.PutTensorsHeader
    arrays: tuple[Array, ...]
    target: int = 0
    progress: Progress | None = None

    def time_limit(self, times: TimeLimits) -> float:
        """Returns the time limit in seconds."""
        return times.stream(sum(array.nbytes for array in self.arrays))


@dataclass(frozen=True)
class Download:
    """A GetTensors stream, answered by a list of new arrays.

    Attributes:
        request: The request, which names the tensors.
        num_bytes: The size of the payload.
        target: The server's index among those of the transport.
        progress: Told how many bytes were moved.
    """

    request: tensor_messages_pb2.GetTensorsRequest
    num_bytes: int
    target: int = 0
    progress: Progress | None = None

    @property
    def repeat(self) -> Repeat:
        """The condition on which it is made again without an answer."""
        return Repeat.of_read(releases=self.request.release)

    def time_limit(self, times: TimeLimits) -> float:
        """Returns the time limit in seconds."""
        return times.stream(self.num_bytes)


class Introduce(NamedTuple):
    """Has the calls over gRPC that follow show who the user of a client at a Unix socket is.

    The answer is None, or why that is not possible: in words, or empty if nothing can be done about it. `with_retries`
    makes it after a call whose caller was not known.

    Attributes:
        target: The server's index among those of the transport.
    """

    target: int = 0


@dataclass(frozen=True)
class Pause:
    """A pause, answered by None."""

    seconds: float


@dataclass(frozen=True)
class Background:
    """An operation of exchanges and pauses to run in the background, answered by None at once.

    It is stopped when the client is closed or garbage-collected.
    """

    begin: Callable[[], Operation[None]]


@dataclass(frozen=True)
class Together:
    """Operations to run at the same time, answered by their results; see `gradserve.calls.combinators`."""

    operations: tuple[Operation[Any], ...]


@dataclass(frozen=True)
class DescribeTransport:
    """The question which way calls take, answered by a TransportInfo.

    Attributes:
        target: The server's index among those of the transport.
    """

    target: int = 0


@dataclass(frozen=True)
class Allocate:
    """The wish for an array from which a server on this machine reads without copying, answered by an array.

    Attributes:
        shape: The shape of the array.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class Track:
    """The wish to tell a caller how far a transfer is, answered by a Progress.

    Attributes:
        progress: The callback; True for a line on a terminal.
    """

    progress: Told


@dataclass(frozen=True)
class CleanUp:
    """The means to clean up after an interruption, answered by a function that runs an operation in the background.

    An operation that is interrupted (its task is cancelled, its thread gets a KeyboardInterrupt) is closed: it can make
    no calls any more. The function can still be called, in any thread. Closing the client waits for a moment
    until such operations have ended.
    """


@dataclass(frozen=True)
class Work:
    """Work that blocks without the network, such as on a file, answered by its result.

    It runs in the calling thread, or in a thread beside the event loop. What it raises ends the operation, except for
    errors of gradserve, which the operation may handle.

    Attributes:
        run: Does the work.
    """

    run: Callable[[], Any]


BeginCleanUp: TypeAlias = "Callable[[Callable[[], Operation[None]]], None]"
"""The answer to a `CleanUp`."""

Local: TypeAlias = DescribeTransport | Allocate | Track | CleanUp | Work
"""The exchanges that a transport answers by itself."""

Exchange: TypeAlias = Unary | Whole | Upload | Download | Pause | Background | Together | Local
Operation: TypeAlias = Generator[Exchange, Any, T]


def forget(_clean_up: Callable[[], Operation[None]]) -> None:
    """Cleans up nothing: the answer to a `CleanUp` of an operation in the background, which ends with the client."""


def check_timeout(timeout: float) -> float:
    """Returns a timeout after a check that it can be sent: a number of seconds, or math.inf for no limit.

    Raises:
        InvalidArgumentError: It is negative, not a number, or more than the 10,000 years that a Duration can hold.
    """
    seconds = as_number(timeout, Argument("timeout"))
    if not (0 <= seconds <= _LONGEST_SECONDS or seconds == math.inf):
        raise InvalidArgumentError(
            f"expected a timeout of at least 0 s, math.inf for no limit, got {timeout}", field="timeout"
        )
    return seconds


@lru_cache(maxsize=16)  # most calls have the client's timeout
def encode_timeout(timeout: float) -> Duration | None:
    """Returns a timeout as a request's field, which is not to be changed: None for math.inf."""
    return None if timeout == math.inf else encode_duration(timeout)


def encode_idle_lease(seconds: Any) -> Duration | None:
    """Returns an idle lease as a request's field: None for none.

    Raises:
        InvalidArgumentError: It is not a number, not positive, or more than the 10,000 years that a Duration can hold.
    """
    if seconds is None:
        return None
    argument = Argument("idle_lease")
    number = as_number(seconds, argument)
    if not 0 < number <= _LONGEST_SECONDS:
        raise argument.error("a positive number of seconds, or None for no end,", seconds)
    return encode_duration(number)


def tracked(
    progress: Callable[[int, int], object] | bool | None, begin: Callable[[Progress | None], Operation[T]]
) -> Operation[T]:
    """Returns an operation that tells the argument `progress` of its caller how far it is.

    Args:
        progress: The argument.
        begin: Begins the operation, with what it has to tell how many bytes were moved; None for nobody.

    Raises:
        InvalidArgumentError: The argument is neither a callable nor a flag.
    """
    if progress is None or progress is False:
        return begin(None)
    if progress is not True and not callable(progress):
        raise Argument("progress").error("a callable, True, False or None", progress)
    return _tracked(progress, begin)


def _tracked(told: Told, begin: Callable[[Progress | None], Operation[T]]) -> Operation[T]:
    progress: Progress = yield Track(told)
    with progress:
        result = yield from begin(progress)
        progress.end()
    return result
