"""Devices: memory for arrays, and the arithmetic on them."""
