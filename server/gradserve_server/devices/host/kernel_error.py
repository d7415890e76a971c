"""The error of kernels."""


class KernelError(Exception):
    """A kernel cannot be made on this machine."""
