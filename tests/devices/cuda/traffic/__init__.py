"""Counts the bytes that kernels load and store, in the emulation, beside the fewest that would do.

A GPU's time for most kernels is that of its memory: what moves twice the fewest bytes takes twice as long.
"""
