"""Layers that hold variables, independent of the transport."""
