"""`python -m tests.devices.cuda.traffic`: prints the table in docs/gpu_kernels.md."""

import functools
import sys
import tempfile
from pathlib import Path

from tests.devices.cuda.ptx import ptx_of, widest_access
from tests.devices.cuda.traffic.measuring import Measured, computations, measure

_ptx = functools.cache(ptx_of)


def main() -> None:
    """Measures all computations, which takes a minute."""
    _write("computation", "dtype", "moves, of the fewest bytes", "of a copy's bandwidth at most", "widest access")
    _write(*["---"] * 5)
    with tempfile.TemporaryDirectory() as folder:
        for computation in computations():
            found = measure(computation, Path(folder))
            at_most = min(1 / found.ratio, 1)
            _write(computation.name, computation.dtype, f"{found.ratio:.2f}x", f"{at_most:.0%}", f"{_widest(found)} B")


def _write(*cells: object) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def _widest(found: Measured) -> int:
    """Returns the widest access of the kernel that moves most."""
    kernel = max(found.launches, key=lambda launch: launch.moved).kernel
    return widest_access(_ptx(found.programs[kernel]), kernel)


if __name__ == "__main__":
    main()
