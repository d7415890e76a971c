"""Puts the stand-in in the place of CuPy, for a block, in this process."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.cuda.stand_in.gpu.machine import Machine
from tests.devices.cuda.stand_in.gpu.settings import VARIABLE, Settings

SITE = Path(__file__).parent / "site"
_VARIABLES = (VARIABLE, "CUPY_CACHE_DIR")
_PACKAGES = ("cupy", "cupyx", "cupy_backends")
_OF_CUDA = ("cuda", "cuda.pathfinder")
"""A namespace, of which only this part is replaced: what else is in it stays imported."""


class StandIn:
    """CuPy's stand-in in this process.

    Attributes:
        cupy: What `import cupy` gives.
        machine: The GPUs below it.
    """

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.machine: Machine = cupy._machine.MACHINE

    @property
    def faults(self) -> Any:
        return self.machine.faults


@contextmanager
def installed(settings: Settings) -> Iterator[StandIn]:
    """Makes `import cupy` import a new stand-in. At the end, everything is as it was, and there must be no fault.

    Threads that used it must have ended before.
    """
    before = _taken()
    outer = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update({name: settings.variables()[name] for name in _VARIABLES})
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()
    try:
        cupy: Any = importlib.import_module("cupy")
        stand_in = StandIn(cupy)
        try:
            yield stand_in
        finally:
            stand_in.machine.close()
            cupy._driver.uninstall()
        stand_in.faults.check()
    finally:
        sys.path.remove(str(SITE))
        for name, value in outer.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _taken()
        sys.modules.update(before)


def _taken() -> dict[str, Any]:
    """Removes the packages from the modules of this process, and returns what there was."""
    names = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES or name in _OF_CUDA]
    return {name: sys.modules.pop(name) for name in names}
