"""The GPUs of this machine, and what there is to use them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The machine and the software that the results depend on.

    Attributes:
        device: The name of the first GPU.
        num_devices: The number of GPUs.
        memory_gib: The memory of the first one.
        compute_capability: Its kind, such as "9.0".
        driver_cuda: The newest CUDA that the driver knows.
        cupy: CuPy's version.
        cudnn: cuDNN's version; None if it cannot be loaded.
        torch: torch's version; None if it is not installed.
    """

    device: str
    num_devices: int
    memory_gib: float
    compute_capability: str
    driver_cuda: int
    cupy: str
    cudnn: int | None
    torch: str | None

    def facts(self) -> dict[str, Any]:
        """Returns the facts by name."""
        return asdict(self)


def look_around() -> Machine | str:
    """Returns the machine, or why it has no GPU that can be used."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: see the extras cuda12 and cuda13"
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        properties = runtime.getDeviceProperties(0)
    except runtime.CUDARuntimeError as error:
        return str(error)
    return Machine(
        device=properties["name"].decode(),
        num_devices=count,
        memory_gib=round(properties["totalGlobalMem"] / (1 << 30), 1),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        driver_cuda=runtime.driverGetVersion(),
        cupy=cupy.__version__,
        cudnn=_cudnn_version(),
        torch=_version("torch"),
    )


def _cudnn_version() -> int | None:
    from gradserve_server.devices.cuda.cudnn import load_cudnn

    try:
        version: int = load_cudnn().version
    except (ImportError, OSError):
        return None
    return version


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
