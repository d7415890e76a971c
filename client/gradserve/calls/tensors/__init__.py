"""Tensors as arguments and results of calls."""
