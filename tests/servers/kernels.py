"""The kernels of the host, compiled once for all processes of a test run.

`python -m tests.servers.kernels FOLDER`, started once for each core, compiles them all.
"""

import fcntl
import gc
import sys
from pathlib import Path

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.parameters.optimizers.stepping import Stepper


def compile_once(folder: Path) -> None:
    """Compiles kernels into Numba's cache, and waits for those that other processes are compiling.

    Every family of ops is compiled by the process that comes first. On an empty cache all take a minute and a half of
    a core, which on a busy machine is many minutes: nothing here gives up.

    Args:
        folder: Where the processes of the run, and no others, note what they have done.
    """
    parallel = ForkJoin(1)
    beside: dict[str, Family] = {"sums": Reducer(parallel), "optimizers": Stepper(parallel)}
    families = {**make_families(CpuDevice(BufferPool(0)), parallel), **beside}
    # FusedBatchNorm takes half of the time: whoever begins with it does nothing else.
    names = sorted(families, key=lambda name: name != BATCH_NORM)
    for may_wait in (False, True):
        for name in names:
            with (folder / f"kernels-of-{name}").open("a+") as note:
                try:
                    fcntl.flock(note, fcntl.LOCK_EX if may_wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                note.seek(0)
                if not note.read():
                    families[name].prepare(lambda: False)
                    note.write("compiled")


if __name__ == "__main__":
    # The compiler makes many objects that die young: a collection each 700 of them takes an eighth of the time.
    gc.freeze()
    gc.set_threshold(50_000, 10, 20)
    compile_once(Path(sys.argv[1]))
