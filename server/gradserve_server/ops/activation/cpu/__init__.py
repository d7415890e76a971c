"""Activation functions on the host."""
