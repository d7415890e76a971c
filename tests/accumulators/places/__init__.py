"""Accumulators in the memory of a device."""
