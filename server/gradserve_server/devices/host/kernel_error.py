"""The error of kernels."""


class KernelError(Exception):
    """A kernel cannot be compiled on this machine."""
