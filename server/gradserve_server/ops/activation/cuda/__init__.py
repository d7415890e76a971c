"""Activation functions on a GPU."""
