"""Whether this machine has what the tests marked `cuda` need."""

import importlib.util


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, and CuPy for it."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
