"""The gain of each part of the tool chain of the host's kernels over plain Numba."""
