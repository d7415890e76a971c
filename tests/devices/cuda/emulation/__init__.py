"""A GPU that is none: the kernels' own source, compiled for the CPU."""
