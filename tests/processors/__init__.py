"""The kernels of the host, for other processors than that of this machine."""
