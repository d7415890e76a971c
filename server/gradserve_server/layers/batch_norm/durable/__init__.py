"""Batch normalization layers that survive the end of their server."""
