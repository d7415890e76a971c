"""The kernels of the host, compiled once for all processes of a test run."""

import fcntl
import tempfile
from pathlib import Path

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.parameters.optimizers.stepping import Stepper


def compile_once(folder: Path) -> None:
    """Compiles kernels into Numba's cache, and waits for those that other processes are compiling.

    Every family of ops is compiled by the process that comes first. On an empty cache all take half a minute of a core,
    which on a busy machine is many minutes: nothing here gives up.

    Args:
        folder: Where the processes of the run, and no others, note what they have done.
    """
    parallel = ForkJoin(1)
    beside: dict[str, Family] = {"sums": Reducer(parallel), "optimizers": Stepper(parallel)}
    families = {**beside, **make_families(CpuDevice(BufferPool(0)), parallel)}
    for may_wait in (False, True):
        for name, family in families.items():
            with (folder / f"kernels-of-{name}").open("a+") as note:
                try:
                    fcntl.flock(note, fcntl.LOCK_EX if may_wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                note.seek(0)
                if not note.read():
                    family.prepare(lambda: False)
                    note.write("compiled")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as notes:
        compile_once(Path(notes))
