"""What each part of the tool chain of the host's kernels gains over plain Numba."""
