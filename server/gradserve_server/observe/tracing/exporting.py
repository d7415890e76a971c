"""Sends the spans of this process to a collector, as OpenTelemetry's environment variables say."""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

_EXPORTERS: Mapping[str, Callable[[], SpanExporter]] = {"otlp": OTLPSpanExporter, "console": ConsoleSpanExporter}
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_LAST_SECONDS = 3.0
"""How long the end of the server waits for the collector."""

_log = logging.getLogger(__name__)


class ExporterError(ValueError):
    """A variable asks for something that is not possible."""


class ExportedTraces(AbstractContextManager[None]):
    """Exports the spans of OpenTelemetry's global provider until the end of the block; what is left goes then.

    OTEL_TRACES_EXPORTER is "otlp" (OTLP over HTTP, the default) or "console", which writes to the standard output. The
    SDK reads the other variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on.
    """

    def __init__(self, version: str, environment: Mapping[str, str] = os.environ) -> None:
        """Takes the version of the server, which the spans name, and the environment variables.

        Raises:
            ExporterError: There is no such exporter or protocol.
        """
        name = environment.get(_EXPORTER) or "otlp"
        if name not in _EXPORTERS:
            raise ExporterError(f"{_EXPORTER}: expected {' or '.join(_EXPORTERS)}, got {name!r}")
        for variable in _PROTOCOLS:
            protocol = environment.get(variable) or _HTTP
            if protocol != _HTTP:
                raise ExporterError(f"{variable}: expected {_HTTP}, got {protocol!r}")
        named = {} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "gradserve"}
        resource = Resource.create({**named, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _EXPORTERS[name]()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def __enter__(self) -> None:
        trace.set_tracer_provider(self._provider)

    def __exit__(self, *_: object) -> None:
        # It would repeat what fails for ten seconds.
        ending = threading.Thread(target=self._provider.shutdown, name="gradserve-last-spans", daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)
        if ending.is_alive():
            _log.warning("the last spans are lost: the collector has not taken them within %g s", _LAST_SECONDS)
            self._exporter.shutdown()
