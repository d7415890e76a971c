"""Sums of lists of arrays in the memory of a GPU."""
