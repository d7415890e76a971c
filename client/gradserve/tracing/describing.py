"""Attributes of spans: what a call is, and what it is about."""

from functools import cache
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor

AttributeValue: TypeAlias = str | int | float | bool

SYSTEM = "rpc.system.name"
METHOD = "rpc.method"
STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"

_SUBJECTS = ("accumulator", "layer")
_VALUES = ("worker_id", "local_step", "num_required", "step", "global_step")


def call_attributes(method: str) -> dict[str, AttributeValue]:
    """Returns what every span of a call has; `method` is "package.Service/Method"."""
    return {SYSTEM: "grpc", METHOD: method}


def message_attributes(message: Any) -> dict[str, AttributeValue]:
    """Returns what a request or a response says about accumulators, layers, workers and steps.

    The names are those of the fields, after "gradserve."; of an accumulator or a layer, the container and the name.
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
    """Returns the fields of a message that name a resource, and those that have a value."""
    fields = descriptor.fields_by_name
    subjects = tuple(name for name in _SUBJECTS if name in fields and _is_reference(fields[name].message_type))
    return subjects, tuple(name for name in _VALUES if name in fields and fields[name].message_type is None)


def _is_reference(descriptor: Descriptor | None) -> bool:
    return descriptor is not None and {"name", "container"} <= set(descriptor.fields_by_name)
