"""The tracer of a client: OpenTelemetry's, if the user asks for traces."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from gradserve.conversion.argument import Argument
from gradserve.errors import InvalidArgumentError
from gradserve.variables import TRACING_VARIABLE

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

CallTracer: TypeAlias = "Tracer"
"""What makes the spans of calls."""
Tracing: TypeAlias = "bool | TracerProvider"
"""What users say: whether there are spans, or what makes tracers."""


_ON = ("1", "on", "true", "yes")
_OFF = ("", "0", "off", "false", "no")
_NAME = "gradserve"


def wanted_tracer(tracing: object, environment: Mapping[str, str]) -> "CallTracer | None":
    """Returns the tracer that an argument asks for, otherwise GRADSERVE_TRACING; None: no traces.

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


def _is_on(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise Argument(TRACING_VARIABLE).error("on or off", text)
    return word in _ON
