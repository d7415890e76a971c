"""Observation of the server: calls, rounds, logs, traces, metrics and the status page."""
