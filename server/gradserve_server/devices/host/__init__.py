"""The host: buffers, threads, and compiled kernels for its processor."""
