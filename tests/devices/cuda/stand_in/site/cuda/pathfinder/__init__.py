"""Stands for NVIDIA's search for its libraries: it finds a cuDNN that works on the simulated GPU."""

from dataclasses import dataclass

from cupy._machine import MACHINE

from tests.devices.cuda.stand_in.cudnn_library import make_library


class DynamicLibNotFoundError(RuntimeError):
    """There is no such library."""


@dataclass(frozen=True)
class LoadedDL:
    """A library that was loaded."""

    abs_path: str


def load_nvidia_dynamic_lib(libname: str) -> LoadedDL:
    if libname != "cudnn":
        raise DynamicLibNotFoundError(libname)
    return LoadedDL(make_library(MACHINE))
