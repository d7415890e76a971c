"""The runtime API's error."""

from tests.devices.cuda.stand_in.gpu.errors import CUDARuntimeError

__all__ = ["CUDARuntimeError"]
