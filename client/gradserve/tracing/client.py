"""The traces of a client's calls: the tracer that the user asks for, and a span around each attempt of a call."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gradserve.calls.combinators import map_steps
from gradserve.calls.exchange import DescribeTransport, Download, Unary, Upload, Whole
from gradserve.calls.retries import Attempt, Attempts, Step
from gradserve.tracing.spans import (
    ERROR_TYPE,
    STATUS_CODE,
    AttributeValue,
    call_attributes,
    message_attributes,
    metadata_of,
)
from gradserve.variables import TRACING_VARIABLE
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import CODE_NAMES, GradserveError, InvalidArgumentError
from gradserve_protocol.tensors import WithContents

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider


CallTracer: TypeAlias = "Tracer"
"""Makes the spans of calls."""
Tracing: TypeAlias = "bool | TracerProvider"
"""The `tracing` argument of users: whether calls have spans, or a provider of tracers."""
T = TypeVar("T")
_PACKAGE = "gradserve.v1"
_PUT = f"{_PACKAGE}.TensorService/PutTensors"
_GET = f"{_PACKAGE}.TensorService/GetTensors"
_NAME = "gradserve"
_ON = ("1", "on", "true", "yes")
_OFF = ("", "0", "off", "false", "no")


def wanted_tracer(tracing: object, environment: Mapping[str, str]) -> "CallTracer | None":
    """Returns the tracer that the argument asks for, else GRADSERVE_TRACING; None for no traces.

    Args:
        tracing: True for OpenTelemetry's global provider of tracers, a provider, False for no traces; None if the
            argument was not given.
        environment: The environment variables.

    Raises:
        InvalidArgumentError: It is none of these, or OpenTelemetry is not installed.
    """
    source = "tracing"
    if tracing is None:
        source, tracing = TRACING_VARIABLE, _is_on(environment.get(TRACING_VARIABLE, ""))
    if tracing is False:
        return None
    import gradserve

    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        raise InvalidArgumentError(
            f"{source}: traces need OpenTelemetry; in a checkout of gradserve: pip install '.[tracing]'",
            field="tracing",
        ) from None
    if tracing is True:
        return trace.get_tracer(_NAME, gradserve.__version__)
    if isinstance(tracing, trace.TracerProvider):
        return tracing.get_tracer(_NAME, gradserve.__version__)
    raise Argument("tracing").error("True, False or a TracerProvider of OpenTelemetry", tracing)


def traced(steps: Attempts[T], tracer: CallTracer) -> Attempts[T]:
    """Puts a span of kind CLIENT around each attempt of a call in the steps of an operation.

    Its parent is the span that is current where the operation runs. The call carries the context of the new span, so
    the server's span becomes its child.
    """

    def spanned(step: Step) -> Attempts[Any]:
        if isinstance(step, Attempt) and isinstance(step.exchange, Unary | Whole | Upload | Download):
            return (yield from _with_span(step, step.exchange, tracer))
        return (yield step)

    return map_steps(steps, spanned)


def _is_on(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise Argument(TRACING_VARIABLE).error("on or off", text)
    return word in _ON


def _with_span(attempt: Attempt, exchange: Unary | Whole | Upload | Download, tracer: CallTracer) -> Attempts[object]:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    name, attributes = _description(exchange)
    span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
    try:
        answer: object = yield attempt._replace(metadata=metadata_of(span))
        if span.is_recording():
            span.set_attribute(STATUS_CODE, "OK")
            span.set_attribute("gradserve.way", (yield DescribeTransport(exchange.target)).way)
    except BaseException as error:
        if span.is_recording():
            _fail(span, error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    else:
        return answer
    finally:
        span.end()


def _fail(span: "Span", error: BaseException) -> None:
    code = next((CODE_NAMES[each] for each in type(error).__mro__ if each in CODE_NAMES), "")
    if isinstance(error, GradserveError):
        span.set_attribute(STATUS_CODE, code or "UNKNOWN")
    span.set_attribute(ERROR_TYPE, code or type(error).__qualname__)


def _description(exchange: Unary | Whole | Upload | Download) -> tuple[str, dict[str, AttributeValue]]:
    """Returns the name of a call's span, and the attributes known before the call."""
    match exchange:
        case Upload():
            return _PUT, {**call_attributes(_PUT), "gradserve.bytes": sum(each.nbytes for each in exchange.arrays)}
        case Download():
            return _GET, {**call_attributes(_GET), "gradserve.bytes": exchange.num_bytes}
        case Whole(call):
            return _description(call)
        case Unary(service, method, request):
            name = f"{_PACKAGE}.{service}/{method}"
            message = request.message if isinstance(request, WithContents) else request
            return name, {**call_attributes(name), **message_attributes(message)}
