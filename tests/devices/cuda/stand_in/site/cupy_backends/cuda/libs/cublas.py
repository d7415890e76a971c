"""cuBLAS's error."""

from tests.devices.cuda.stand_in.gpu.errors import CUBLASError

__all__ = ["CUBLASError"]
