"""Spans of calls, for client and server: their attributes, and their context in metadata (W3C Trace Context).

Imports OpenTelemetry only when a trace is written.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.descriptor import Descriptor

from gradserve_protocol.frames import Metadata

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


AttributeValue: TypeAlias = str | int | float | bool
SYSTEM = "rpc.system.name"
METHOD = "rpc.method"
STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"
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
