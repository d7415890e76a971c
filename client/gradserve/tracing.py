"""The traces of calls: spans around the attempts of a client's calls, and what the spans of client and server share.

That is their attributes, and their context in metadata (W3C Trace Context). OpenTelemetry is imported only where traces
are wanted.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from gradserve.interceptors import GET_TENSORS, PUT_TENSORS, Around, CallInfo, Interceptor, attributes_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import CODE_NAMES, GradserveError, InvalidArgumentError
from gradserve_protocol.frames import Metadata

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue: TypeAlias = str | int | float | bool
SYSTEM = "rpc.system.name"
METHOD = "rpc.method"
STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"
_NAME = "gradserve"


def call_attributes(method: str) -> dict[str, AttributeValue]:
    """Returns the attributes of every call; `method` is "package.Service/Method"."""
    return {SYSTEM: "grpc", METHOD: method}


def message_attributes(message: Any) -> dict[str, AttributeValue]:
    """Returns the accumulator, layer, worker and steps of a request or a response: its fields, after "gradserve."."""
    return _prefixed(attributes_of(message))


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, AttributeValue]:
    return {f"gradserve.{name}": value for name, value in attributes.items()}


def metadata_of(span: "Span") -> Metadata:
    """Returns the metadata with which a call continues the trace of a span."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    carrier: dict[str, str] = {}
    _propagator().inject(carrier, trace.set_span_in_context(span, Context()))
    return tuple(carrier.items())


def context_in(metadata: Mapping[str, str]) -> "Context":
    """Returns the context that the metadata of a call continues; an empty one if they name no valid context."""
    from opentelemetry.context import Context

    return _propagator().extract(metadata, Context())


@cache
def _propagator() -> "TraceContextTextMapPropagator":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


CallTracer: TypeAlias = "Tracer"
"""Makes the spans of calls."""
Tracing: TypeAlias = "bool | TracerProvider"
"""The `tracing` argument of users: whether calls have spans, or a provider of tracers."""


def tracer_of(wanted: object, source: str, version: str) -> CallTracer:
    """Returns the tracer of this version of the client that a user wants: True is that of the global provider.

    Args:
        wanted: True, or a provider of tracers.
        source: The argument or variable that says so.
        version: The version.

    Raises:
        InvalidArgumentError: It is neither, or OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        raise InvalidArgumentError(
            f"{source}: traces need OpenTelemetry; in a checkout of gradserve: pip install '.[tracing]'",
            field="tracing",
        ) from None
    if wanted is True:
        return trace.get_tracer(_NAME, version)
    if isinstance(wanted, trace.TracerProvider):
        return wanted.get_tracer(_NAME, version)
    raise Argument("tracing").error("True, False or a TracerProvider of OpenTelemetry", wanted)


class TracedAttempts(Interceptor):
    """Puts a span of kind CLIENT around each attempt of a call that the user makes.

    Its parent is the span that is current where the operation runs. The call carries the context of the new span, so
    the server's span becomes its child.
    """

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer

    def around_attempt(self, call: CallInfo) -> Around:
        """Makes the span."""
        if call.in_background:
            yield None
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        attributes = {**call_attributes(call.method), **_prefixed(call.attributes)}
        if call.method in (PUT_TENSORS, GET_TENSORS):
            attributes["gradserve.bytes"] = call.num_bytes
        span = self._tracer.start_span(call.method, kind=SpanKind.CLIENT, attributes=attributes)
        try:
            answer = yield dict(metadata_of(span))
            if span.is_recording():
                span.set_attribute(STATUS_CODE, "OK")
                span.set_attribute("gradserve.way", answer.way)
        except BaseException as error:
            if span.is_recording():
                _fail(span, error)
                span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.end()


def _fail(span: "Span", error: BaseException) -> None:
    code = next((CODE_NAMES[each] for each in type(error).__mro__ if each in CODE_NAMES), "")
    if isinstance(error, GradserveError):
        span.set_attribute(STATUS_CODE, code or "UNKNOWN")
    span.set_attribute(ERROR_TYPE, code or type(error).__qualname__)
