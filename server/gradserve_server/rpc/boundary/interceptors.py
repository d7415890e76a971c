"""The interceptors of every server, in the order of the chain: the outermost comes first.

Observation, traces, faults, admission, access, readable requests. `Services` puts them around each method.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve.tracing import ERROR_TYPE, STATUS_CODE, call_attributes, context_in, message_attributes
from gradserve_protocol.tensors import WithContents
from gradserve_server.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.observe.calls import CallRecord, Calls, MethodCalls, Origin, current_call
from gradserve_server.observe.logs import FailureLog
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.registry import DEFAULT_CONTAINER
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_server.rpc.boundary.messages import MalformedMessage
from gradserve_server.rpc.boundary.status import status_code
from gradserve_server.security.access import RULES, Access, no_rule
from gradserve_server.security.identity import CallRates, Identity, ShareRules

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger(__name__)
_calls_log = logging.getLogger("gradserve_server.calls")

_KINDS = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
_SPAN_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""The codes that mark a server's span as failed, by OpenTelemetry's conventions; others are the client's mistakes."""
_RETRY_SECONDS = 0.5
"""Seconds after which a client with too many calls may try again."""


class ObservedCalls:
    """Counts, times and logs every call. The outermost interceptor: it sees the errors that clients get.

    The time ends when the answer is ready; it does not include serializing and sending.
    """

    def __init__(self, calls: Calls, failures: FailureLog) -> None:
        self._calls = calls
        self._failures = failures

    def refuse(self, method: MethodDescriptor, origin: Callable[[], Origin], error: ServiceError) -> None:
        """Counts a call whose payload could not be received, so that it never reached the chain."""
        calls = self._calls_of(method)
        calls.started += 1
        code = status_code(error)
        self._calls.failed(method.full_name, code, error.message)
        record = CallRecord(method.full_name, time.monotonic(), origin)
        self._failures.failed(record, code, error.message)
        record.has_ended = True
        calls.end(code, 0.0, 0.0)

    def _calls_of(self, method: MethodDescriptor) -> MethodCalls:
        kind = _KINDS[method.client_streaming, method.server_streaming]
        return self._calls.of(method.containing_service.full_name, method.name, kind)

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that observes each call."""
        all_calls, failures, clock = self._calls, self._failures, time.monotonic
        calls = self._calls_of(method)
        name = method.full_name

        async def observed(request: Any, call: Call) -> Any:
            calls.started += 1
            began = clock()
            record = CallRecord(name, began, call.origin)
            code = "CANCELLED"
            try:
                response = await handle(request, call)
                code = "OK"
            except ServiceError as error:
                code = status_code(error)
                if not (isinstance(error, NotFoundError) and error.is_awaited):
                    all_calls.failed(name, code, error.message)
                    failures.failed(record, code, error.message)
                raise
            except asyncio.CancelledError:
                if call.time_left() == 0.0:
                    code = "DEADLINE_EXCEEDED"
                raise
            finally:
                record.has_ended = True
                seconds = clock() - began
                calls.end(code, seconds, record.waited)
                if _calls_log.isEnabledFor(logging.DEBUG):
                    _calls_log.debug("%s: %s after %.6f s, %.6f of them waiting", name, code, seconds, record.waited)
            return response

        return observed


class TracedCalls:
    """Opens a SERVER span for each call, a child of the client's span. Belongs right inside `ObservedCalls`.

    A span ends when the answer is ready: it covers neither receiving the request nor sending the answer.
    """

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that opens a span for each call."""
        from opentelemetry.trace import SpanKind

        tracer = self._tracer
        name = f"{method.containing_service.full_name}/{method.name}"
        attributes = call_attributes(name)

        async def traced(request: Any, call: Call) -> Any:
            origin = call.origin()
            context = context_in(origin.metadata)
            span = tracer.start_span(name, context, SpanKind.SERVER, {**attributes, "client.address": origin.peer})
            record = current_call()
            if record is not None:
                record.span = span
            code = "CANCELLED"
            try:
                if span.is_recording() and not method.client_streaming:
                    span.set_attributes(message_attributes(request))
                response = await handle(request, call)
                code = "OK"
                if span.is_recording():
                    message = response.message if isinstance(response, WithContents) else response
                    if hasattr(message, "DESCRIPTOR"):
                        span.set_attributes(message_attributes(message))
            except ServiceError as error:
                code = status_code(error)
                _fail(span, code, error.message)
                raise
            except asyncio.CancelledError:
                if call.time_left() == 0.0:
                    code = "DEADLINE_EXCEEDED"
                _fail(span, code, "")
                raise
            finally:
                if record is not None and record.identity:
                    span.set_attribute("gradserve.identity", record.identity)
                span.set_attribute(STATUS_CODE, code)
                span.end()
            return response

        return traced


def _fail(span: "Span", code: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(ERROR_TYPE, code)
    if code in _SPAN_FAULTS:
        span.set_status(Status(StatusCode.ERROR, message))


class Faults:
    """Turns every exception into a ServiceError, and logs the server's own faults.

    Clients learn that an unexpected error happened, but not which.
    """

    def __init__(self, on_fault: Callable[[], object] = lambda: None) -> None:
        self._on_fault = on_fault

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that raises nothing but ServiceError."""
        name = method.full_name

        async def guarded(request: Any, call: Call) -> Any:
            try:
                return await handle(request, call)
            except InternalError:
                _log.exception("%s failed", name)
                self._on_fault()
                raise
            except ServiceError:
                raise
            except MemoryError:
                _log.exception("%s ran out of memory", name)
                raise ResourceExhaustedError(
                    "the server has no memory left for this call", code="GS_NO_MEMORY"
                ) from None
            except Exception:
                _log.exception("%s failed", name)
                self._on_fault()
                record = current_call()
                where = "" if record is None else f" under {record.request_id}"
                raise InternalError(f"internal error; the server's log has the details{where}") from None

        return guarded


class Admission:
    """Admits calls until the server drains, then refuses them with UnavailableError."""

    def __init__(self) -> None:
        self.is_open = True
        """True while calls are admitted."""

    def check(self) -> None:
        """Raises UnavailableError while the server drains."""
        if not self.is_open:
            raise UnavailableError("the server is shutting down", code="GS_SHUTTING_DOWN")

    def close(self) -> None:
        """Refuses all calls from now on."""
        self.is_open = False

    def around(self, _method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle for admitted calls only."""

        def admitted(request: Any, call: Call) -> Any:
            if not self.is_open:
                self.check()
            return handle(request, call)

        return admitted


class FairCalls:
    """Gives each identity a fair share of the calls in flight, and limits how often it makes calls.

    Used on the event loop only.
    """

    def __init__(self, max_calls: int, rules: ShareRules) -> None:
        self._under_way = Budget(
            max_calls,
            "calls under way",
            rules,
            of_identity=lambda own: own.max_calls,
            retry_after=_RETRY_SECONDS,
            code="GS_TOO_MANY_CALLS",
        )
        self._rates = CallRates(time.monotonic, rules.of_identity)

    @contextmanager
    def call_of(self, identity: Identity) -> Iterator[None]:
        """Counts a call of an identity while it is in flight.

        Raises:
            ResourceExhaustedError: The identity has too many calls in flight, or makes them too often.
        """
        with self._under_way.reserve(owner=identity) as call:
            call.expect(1)
            self._rates.begin(identity)
            call.settle(1)  # listeners keep the limit of all
            yield


class AccessChecks:
    """Admits calls whose callers have the role that the method needs, and adds their identities."""

    def __init__(self, access: Access, calls: FairCalls) -> None:
        self._access = access
        self._calls = calls

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle for the calls that the policy allows."""
        name = method.full_name
        rule = RULES.get(name)
        if rule is None:
            return _refused(name)
        if rule.role is None:
            return handle
        container_of, access, calls = _container_of(rule.containers), self._access, self._calls
        other_container_of = _container_of(rule.also_in) if rule.also_in else None

        async def admitted(request: Any, call: Call) -> Any:
            container = container_of(request)
            found = access.admit(call.credentials(), name, rule, container)
            if other_container_of is not None:
                access.admit(call.credentials(), name, rule, other_container_of(request))
            record = current_call()
            if record is not None:
                record.identity = found.identity.name
            known = replace(call, identity=found.identity, may_only_open=found.may_only_open)
            with calls.call_of(found.identity):
                return await handle(request, known)

        return admitted


def _refused(name: str) -> Handle:
    def refused(_request: Any, _call: Call) -> Any:
        raise no_rule(name)

    return refused


def _container_of(paths: Sequence[str]) -> Callable[[Any], str | None]:
    """Returns a function that finds the container of a request: None if it names none or is malformed."""
    if not paths:
        return lambda _request: None
    places = [tuple(path.rpartition(".")[::2]) for path in paths]

    def find(request: Any) -> str | None:
        if isinstance(request, MalformedMessage):
            return None  # ReadableRequests comes later
        message, field = next((each for each in places if each[0] and request.HasField(each[0])), places[0])
        found: str = getattr(getattr(request, message) if message else request, field)
        return found or DEFAULT_CONTAINER

    return find


class ReadableRequests:
    """Refuses requests that are not valid protobuf with InvalidArgumentError, and waits until payloads can be read.

    A payload in GPU memory takes a moment if the client is still computing it when it makes the call.
    """

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle for requests that can be read."""
        if method.client_streaming:
            return lambda requests, call: handle(_checked_all(requests), call)

        async def prepared(prepare: Callable[[], Awaitable[None]], request: Any, call: Call) -> Any:
            await prepare()
            return await handle(request, call)

        def readable(request: Any, call: Call) -> Awaitable[Any]:
            if isinstance(request, MalformedMessage):
                raise _malformed(request)
            if call.prepare is None or method.server_streaming:
                return handle(request, call)
            return prepared(call.prepare, request, call)

        return readable


def _malformed(request: MalformedMessage) -> InvalidArgumentError:
    return InvalidArgumentError(f"the message is not valid protobuf of the expected type: {request.reason}")


async def _checked_all(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, MalformedMessage):
            raise _malformed(request)
        yield request
