"""Tracing code that client and server share."""
