"""Accumulators that survive the end of their server."""
