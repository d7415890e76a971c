"""Activation functions, and their gradients."""
