"""The tracer of a server."""

from typing import TYPE_CHECKING

from gradserve_server.runtime.extras import require

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

_NAME = "gradserve_server"


def wanted_tracer(provider: "TracerProvider | None", version: str, *, is_wanted: bool) -> "Tracer | None":
    """Returns the tracer of a server; None if there are to be no traces.

    Args:
        provider: What makes tracers; None for OpenTelemetry's global provider.
        version: The version of the server, which the spans name.
        is_wanted: Whether there are to be traces without a provider, too.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if provider is None and not is_wanted:
        return None
    require("tracing")
    from opentelemetry import trace

    return (provider or trace.get_tracer_provider()).get_tracer(_NAME, version)
