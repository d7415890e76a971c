"""Layers that hold variables, apart from how calls of them travel."""
