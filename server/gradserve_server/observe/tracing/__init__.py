"""Traces: spans of calls, of waits and of rounds, by OpenTelemetry. docs/tracing.md describes them."""
