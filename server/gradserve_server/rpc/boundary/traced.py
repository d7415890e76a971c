"""Puts a span around every call."""

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve.tracing.describing import ERROR_TYPE, STATUS_CODE, call_attributes, message_attributes
from gradserve.wire.tensors import WithContents
from gradserve_server.errors import ServiceError
from gradserve_server.observe.call_record import current_call
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle
from gradserve_server.rpc.boundary.status import status_code

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""The codes with which a server's span has failed, by OpenTelemetry's conventions; others are the client's mistakes."""


class TracedCalls:
    """Makes a span of kind SERVER for each call, a child of the client's. Belongs right inside `ObservedCalls`.

    A span ends when the answer is ready: it includes neither receiving the request nor sending the answer.
    """

    def __init__(self, tracer: "Tracer") -> None:
        """Takes what makes the spans."""
        self._tracer = tracer

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that makes a span for each call."""
        from opentelemetry.trace import SpanKind

        from gradserve.tracing.context import context_in

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
                code = status_code(error).name
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
    if code in _FAULTS:
        span.set_status(Status(StatusCode.ERROR, message))
