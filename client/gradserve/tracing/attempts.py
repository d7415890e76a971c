"""Puts a span around each attempt of a call."""

from typing import TYPE_CHECKING, Any, TypeVar

from gradserve.calls.combinators import map_steps
from gradserve.calls.exchange import DescribeTransport, Download, Unary, Upload, Whole
from gradserve.calls.retries import Attempt, Attempts, Step
from gradserve.errors import CODE_NAMES, GradserveError
from gradserve.tracing.describing import ERROR_TYPE, STATUS_CODE, AttributeValue, call_attributes, message_attributes
from gradserve.tracing.tracer import CallTracer
from gradserve.wire.tensors import WithContents

if TYPE_CHECKING:
    from opentelemetry.trace import Span

T = TypeVar("T")

_PACKAGE = "gradserve.v1"
_PUT = f"{_PACKAGE}.TensorService/PutTensors"
_GET = f"{_PACKAGE}.TensorService/GetTensors"


def traced(steps: Attempts[T], tracer: "CallTracer") -> Attempts[T]:
    """Passes on the steps of an operation, with a span of kind CLIENT around each attempt of a call.

    The parent of a span is the current span where the operation runs. The call carries the context of its own span, so
    that the server's span is a child of it.
    """

    def spanned(step: Step) -> Attempts[Any]:
        if isinstance(step, Attempt) and isinstance(step.exchange, Unary | Whole | Upload | Download):
            return (yield from _with_span(step, step.exchange, tracer))
        return (yield step)

    return map_steps(steps, spanned)


def _with_span(attempt: Attempt, exchange: Unary | Whole | Upload | Download, tracer: "CallTracer") -> Attempts[object]:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    from gradserve.tracing.context import metadata_of

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
    """Returns the name of a call's span, and the attributes that are known before the call."""
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
