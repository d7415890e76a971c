"""The driver API's error."""

from tests.devices.cuda.stand_in.gpu.errors import CUDADriverError

__all__ = ["CUDADriverError"]
