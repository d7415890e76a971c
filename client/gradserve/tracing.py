"""The traces of calls: spans around the attempts of a client's calls, and what the spans of client and server share.

That is their attributes, and their context in metadata (W3C Trace Context). OpenTelemetry is imported only where traces
are wanted.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor

from gradserve.calls.combinators import map_steps
from gradserve.calls.exchange import DescribeTransport, Download, Unary, Upload, Whole
from gradserve.calls.retries import Attempt, Attempts, Step
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import CODE_NAMES, GradserveError, InvalidArgumentError
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import WithContents

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
_SUBJECTS = ("accumulator", "layer")
_VALUES = ("worker_id", "local_step", "num_required", "step", "global_step")


def call_attributes(method: str) -> dict[str, AttributeValue]:
    """Returns the attributes of every call; `method` is "package.Service/Method"."""
    return {SYSTEM: "grpc", METHOD: method}


def message_attributes(message: Any) -> dict[str, AttributeValue]:
    """Returns the accumulator, layer, worker and steps of a request or a response.

    Attributes are named like the fields, after "gradserve."; an accumulator or a layer has its name and container.
    """
    subjects, values = _fields_of(message.DESCRIPTOR)
    attributes: dict[str, AttributeValue] = {f"gradserve.{name}": getattr(message, name) for name in values}
    for name in subjects:
        subject = getattr(message, name)
        if subject.name:
            attributes[f"gradserve.{name}"] = subject.name
        if subject.container:
            attributes["gradserve.container"] = subject.container
    return {name: value for name, value in attributes.items() if value != ""}


@cache
def _fields_of(descriptor: Descriptor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the fields of a message that refer to a resource, and those with plain values."""
    fields = descriptor.fields_by_name
    subjects = tuple(name for name in _SUBJECTS if name in fields and _is_reference(fields[name].message_type))
    return subjects, tuple(name for name in _VALUES if name in fields and fields[name].message_type is None)


def _is_reference(descriptor: Descriptor | None) -> bool:
    return descriptor is not None and {"name", "container"} <= set(descriptor.fields_by_name)


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
T = TypeVar("T")
_PACKAGE = "gradserve.v1"
_PUT = f"{_PACKAGE}.TensorService/PutTensors"
_GET = f"{_PACKAGE}.TensorService/GetTensors"


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
