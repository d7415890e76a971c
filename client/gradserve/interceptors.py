"""Interceptors: code of users around the calls of their clients, the same with and without `await`.

Calls are generators without I/O, and so are interceptors. They run in the thread or task that makes the call, whatever
carries it, and around calls that the client makes at the same time or in the background, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor

from gradserve.calls.combinators import map_steps
from gradserve.calls.exchange import (
    NOT_CARRIED,
    DescribeTransport,
    Download,
    Exchange,
    Operation,
    Reply,
    TimeLimits,
    Unary,
    Upload,
    Whole,
)
from gradserve.calls.retries import Attempt, Attempts, Step, is_repeatable
from gradserve.results import TransportInfo
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import WithContents

T = TypeVar("T")
_PACKAGE = "gradserve.v1"
PUT_TENSORS = f"{_PACKAGE}.TensorService/PutTensors"
GET_TENSORS = f"{_PACKAGE}.TensorService/GetTensors"
_SUBJECTS = ("accumulator", "layer", "parameters")
_VALUES = ("worker_id", "local_step", "num_required", "step", "global_step")
_KEY = re.compile(r"(?!grpc-)[a-z0-9_.-]{1,100}(?<!-bin)")
_VALUE = re.compile(r"[ -~]*")


@dataclass(frozen=True)
class CallInfo:
    """A call of a method of the server, or one attempt of it, as interceptors see it.

    Most methods of a client make one such call. Some make several: one for each server, or to send large tensors first.

    Attributes:
        method: The name of the method in the protos, such as "gradserve.v1.AccumulatorService/PushPull".
        name: The name of the accumulator, layer or parameters; empty for none.
        container: Its container as the call names it; empty for the default one.
        attributes: The fields of the request, by name, that it has out of "accumulator", "layer", "parameters",
            "container", "worker_id", "local_step", "num_required", "step", "global_step".
        server: The server's index among those of the client.
        num_bytes: The bytes of the tensors that it sends, or that a download brings.
        timeout: The seconds that all its attempts may take, or that are left for this attempt; None for no limit.
        attempt: The number of the attempt, from 1; 0 for the call as a whole.
        in_background: Whether the client makes it by itself: it renews leases, and sends again what was not durable.
        metadata: The metadata that interceptors have added.
    """

    method: str
    name: str = ""
    container: str = ""
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    server: int = 0
    num_bytes: int = 0
    timeout: float | None = None
    attempt: int = 0
    in_background: bool = False
    metadata: Metadata = field(default=(), repr=False)


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a call, as interceptors see it.

    Attributes:
        way: The way that it came: "shared_memory", "bulk", "grpc" or "in_process". Empty for a call in the background,
            and for one with large tensors that only a socket could carry, where there is none: the client then sends
            them as a stream, which is its next call.
        num_bytes: The bytes of the tensors beside its message.
        attempts: The number of attempts that the call took.
    """

    way: str
    num_bytes: int
    attempts: int


Around: TypeAlias = Generator[Mapping[str, str] | None, CallAnswer, None]
"""The work of an interceptor around a call: it yields once to make the call, and gets the answer or the error there."""


class Interceptor:
    """The base class of what users put around the calls of a client: `gradserve.connect(..., interceptors=[...])`.

    Its methods are generators. Each yields once, which makes the call: `yield` returns a `CallAnswer`, or raises the
    call's error. It may yield metadata for the call, a dict of texts. The first interceptor of a list is the outermost.

    An exception that it raises ends the call and reaches the caller. If it yields again after an error, the client
    makes the call again with the same request id, so that it counts once; where it cannot, the error is raised all the
    same.

    One interceptor may act around several calls at the same time, in several threads.
    """

    def around_call(self, call: CallInfo) -> Around:
        """Acts around a call: all its attempts, and the pauses between them.

        Args:
            call: The call.
        """
        yield None

    def around_attempt(self, call: CallInfo) -> Around:
        """Acts around an attempt of a call. An UnavailableError that it raises leads to another attempt.

        Args:
            call: The attempt.
        """
        yield None


@dataclass(frozen=True)
class Interceptors:
    """The interceptors of a client.

    Attributes:
        calls: What acts around calls, the outermost first.
        attempts: What acts around attempts.
    """

    calls: tuple[Callable[[CallInfo], Around], ...] = ()
    attempts: tuple[Callable[[CallInfo], Around], ...] = ()

    @classmethod
    def of(cls, given: Sequence[Interceptor]) -> Self:
        """Returns what interceptors do themselves, and do not inherit from `Interceptor`."""
        kinds = [(each, type(each)) for each in given]
        return cls(
            tuple(each.around_call for each, kind in kinds if kind.around_call is not Interceptor.around_call),
            tuple(each.around_attempt for each, kind in kinds if kind.around_attempt is not Interceptor.around_attempt),
        )


def checked_interceptors(given: object) -> tuple[Interceptor, ...]:
    """Returns the argument `interceptors` of users.

    Raises:
        InvalidArgumentError: It is no list of interceptors.
    """
    argument = Argument("interceptors")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise argument.error("a list of gradserve.Interceptor", given)
    for index, each in enumerate(given):
        if not isinstance(each, Interceptor):
            raise Argument(f"interceptors[{index}]", argument.name).error("a gradserve.Interceptor", each)
    return tuple(given)


def intercepted(
    operation: Operation[T],
    interceptors: Interceptors,
    times: TimeLimits,
    attempts: Callable[[Operation[T]], Attempts[T]],
    *,
    in_background: bool,
) -> Attempts[T]:
    """Returns the steps of an operation with interceptors around its calls and their attempts.

    Args:
        operation: The operation.
        interceptors: The interceptors.
        times: The time limits of calls.
        attempts: Returns an operation with its retries.
        in_background: Whether the client carries it out by itself.
    """
    interception = _Interception(interceptors, times, in_background=in_background)
    return map_steps(attempts(map_steps(operation, interception.around_call)), interception.around_attempt)


class _Interception:
    """The interceptors around the calls of one operation, which makes one call at a time."""

    def __init__(self, interceptors: Interceptors, times: TimeLimits, *, in_background: bool) -> None:
        self._interceptors = interceptors
        self._times = times
        self._in_background = in_background
        self._exchange: Exchange | None = None
        self._call: CallInfo | None = None
        self._num_attempts = 0

    def around_call(self, exchange: Exchange) -> Operation[Any]:
        """Makes a call; answers any other exchange as it is."""
        if not isinstance(exchange, Unary | Whole | Upload | Download):
            return (yield exchange)

        def carry(call: CallInfo) -> Operation[Any]:
            self._exchange, self._call = exchange, call
            return (yield exchange)

        self._num_attempts = 0
        call = _described(exchange, exchange.time_limit(self._times), in_background=self._in_background)
        return (yield from self._through(self._interceptors.calls, call, exchange, carry))

    def around_attempt(self, step: Step) -> Attempts[Any]:
        """Makes an attempt; answers any other step as it is."""
        call = self._call
        if not isinstance(step, Attempt) or call is None:
            return (yield step)
        exchange = step.exchange
        if not isinstance(exchange, Unary | Whole | Upload | Download):  # an introduction for the call
            return (yield step._replace(metadata=call.metadata))
        if exchange is self._exchange:
            self._num_attempts += 1
            call = replace(call, timeout=step.timeout, attempt=self._num_attempts)
        else:  # of a call that makes the other one valid again
            described = _described(exchange, step.timeout, in_background=self._in_background)
            call = replace(described, attempt=1, metadata=call.metadata)

        def carry(call: CallInfo) -> Attempts[Any]:
            return (yield step._replace(metadata=call.metadata))

        return (yield from self._through(self._interceptors.attempts, call, exchange, carry))

    def _through(
        self,
        arounds: Sequence[Callable[[CallInfo], Around]],
        call: CallInfo,
        exchange: Unary | Whole | Upload | Download,
        carry: Callable[[CallInfo], Generator[Any, Any, Any]],
    ) -> Generator[Any, Any, Any]:
        """Makes a call or an attempt inside of interceptors, the outermost first."""
        if not arounds:
            return (yield from carry(call))
        around, *inner = arounds
        flow = around(call)
        try:
            given = _started(flow, around)
            while True:
                try:
                    answer = yield from self._through(inner, _with_metadata(call, given), exchange, carry)
                    seen = yield from self._seen(answer, exchange)
                except GradserveError as error:
                    is_again, given = _failed(flow, error)
                    if not (is_again and is_repeatable(exchange, error)):
                        raise  # an interceptor makes no answer of it
                else:
                    _finished(flow, seen, around)
                    return answer
        finally:
            flow.close()

    def _seen(self, answer: Any, exchange: Unary | Whole | Upload | Download) -> Generator[Any, Any, CallAnswer]:
        way = ""
        if answer is not NOT_CARRIED and not self._in_background:
            info: TransportInfo = yield DescribeTransport(exchange.target)
            way = info.way
        return CallAnswer(way, _num_bytes_in(answer), self._num_attempts)


def _started(flow: Around, around: Callable[[CallInfo], Around]) -> Mapping[str, str] | None:
    try:
        return next(flow)
    except StopIteration:
        raise RuntimeError(f"{around.__qualname__} has not made the call: it must yield") from None


def _failed(flow: Around, error: GradserveError) -> tuple[bool, Mapping[str, str] | None]:
    """Tells an interceptor of an error; returns whether it makes the call again, and with which metadata."""
    try:
        return True, flow.throw(error)
    except StopIteration:
        return False, None


def _finished(flow: Around, answer: CallAnswer, around: Callable[[CallInfo], Around]) -> None:
    try:
        flow.send(answer)
    except StopIteration:
        return
    raise RuntimeError(f"{around.__qualname__} has yielded again, although the call was answered")


def _with_metadata(call: CallInfo, given: Mapping[str, str] | None) -> CallInfo:
    """Returns a call with further metadata, in front of the others: what the server knows comes last and must fit."""
    if not given:
        return call
    for key, value in given.items():
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise Argument("metadata").error("keys in lower case that neither begin with grpc- nor end with -bin", key)
        if not (isinstance(value, str) and _VALUE.fullmatch(value)):
            expected = "visible ASCII characters and spaces"
            raise Argument(f"metadata {key!r}", "metadata").error_saying(expected, "something else")
    return replace(call, metadata=(*given.items(), *(each for each in call.metadata if each[0] not in given)))


def _described(exchange: Unary | Whole | Upload | Download, timeout: float | None, *, in_background: bool) -> CallInfo:
    call = exchange.call if isinstance(exchange, Whole) else exchange
    num_bytes = exchange.num_bytes if isinstance(exchange, Whole) else 0
    message: Any
    match call:
        case Upload(header, arrays):
            method, message, num_bytes = PUT_TENSORS, header, sum(each.nbytes for each in arrays)
        case Download(request, num_bytes):
            method, message = GET_TENSORS, request
        case Unary(service, name, WithContents() as request):
            method, message = f"{_PACKAGE}.{service}/{name}", request.message
        case Unary(service, name, request):
            method, message = f"{_PACKAGE}.{service}/{name}", request
    attributes = attributes_of(message)
    return CallInfo(
        method,
        str(next((attributes[each] for each in _SUBJECTS if each in attributes), "")),
        str(attributes.get("container", "")),
        attributes,
        exchange.target,
        num_bytes,
        None if timeout == float("inf") else timeout,
        in_background=in_background,
    )


def _num_bytes_in(answer: Any) -> int:
    match answer:
        case Reply(_, arrays):
            return sum(each.nbytes for each in arrays.values())
        case list():
            return sum(each.nbytes for each in answer)
    return 0


def attributes_of(message: Any) -> dict[str, str | int]:
    """Returns the accumulator, layer, parameters, container, worker and steps that a request or a response has."""
    subjects, values = _fields_of(message.DESCRIPTOR)
    attributes: dict[str, str | int] = {name: getattr(message, name) for name in values}
    for name in subjects:
        subject = getattr(message, name)
        if subject.name:
            attributes[name] = subject.name
        if subject.container:
            attributes["container"] = subject.container
    return {name: value for name, value in attributes.items() if value != ""}


@cache
def _fields_of(descriptor: Descriptor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the fields of a message that refer to a resource, and those with plain values."""
    fields = descriptor.fields_by_name
    subjects = tuple(name for name in _SUBJECTS if name in fields and _is_reference(fields[name].message_type))
    return subjects, tuple(name for name in _VALUES if name in fields and fields[name].message_type is None)


def _is_reference(descriptor: Descriptor | None) -> bool:
    return descriptor is not None and {"name", "container"} <= set(descriptor.fields_by_name)
