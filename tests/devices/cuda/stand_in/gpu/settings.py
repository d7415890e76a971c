"""How a simulated GPU behaves."""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

VARIABLE = "CUPY_STAND_IN"
"""The environment variable with the settings of a process, in JSON."""


@dataclass(frozen=True)
class Settings:
    """The settings of the GPUs of a process.

    Attributes:
        folder: Where programs are compiled to, for all processes of a test run.
        report: The file to which faults are appended; None to keep them in this process only.
        seed: Of the order in which streams, blocks and threads run.
        num_gpus: The number of GPUs.
        usable: The indices of those on which this process may have a context.
        total_bytes: The memory of each GPU.
        module_bytes: The memory that loading a module takes, outside the pool.
        cublas_bytes: The memory that a cuBLAS handle takes, outside the pool.
        cudnn_bytes: The memory that a cuDNN handle takes, outside the pool.
        patience_seconds: After so long, work runs even if nobody waits for it.
        dead_exporters: "stay" if memory of a process that has died stays valid where it is open, "fault" if a use
            of it is a fault. CUDA's documentation does not say. Drivers keep the memory as long as it is mapped.
        failures: How many of the next requests fail for want of memory: "malloc", "hostAlloc", "hostRegister",
            "module", "cublas", "cudnn".
    """

    folder: str
    report: str | None = None
    seed: int = 1
    num_gpus: int = 2
    usable: tuple[int, ...] = (0,)
    total_bytes: int = 1 << 30
    module_bytes: int = 1 << 12
    cublas_bytes: int = 1 << 16
    cudnn_bytes: int = 1 << 16
    patience_seconds: float = 0.005
    dead_exporters: str = "stay"
    failures: dict[str, int] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of a process with these settings."""
        root = Path(__file__).parents[5]
        paths = [str(Path(__file__).parents[1] / "site"), str(root), os.environ.get("PYTHONPATH", "")]
        return {
            VARIABLE: json.dumps(asdict(self)),
            "CUPY_CACHE_DIR": str(Path(self.folder) / "kernels"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def but(self, **changes: Any) -> "Settings":
        """Returns other settings."""
        return replace(self, **changes)


def settings_of_process() -> Settings:
    """Returns what the environment says."""
    values = json.loads(os.environ[VARIABLE])
    return Settings(**values | {"usable": tuple(values["usable"])})
