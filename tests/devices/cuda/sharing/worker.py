"""A client on a simulated GPU, in a process of its own: does what its input says, one line at a time.

Arguments: the address of the server. Each line of the input names a function below; its answer is a line of the output.
"""

import sys

import cupy
import numpy as np

import gradserve

SIZE = 20_000


def tell(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


class Worker:
    def __init__(self, address: str) -> None:
        cupy.cuda.Device(0).use()
        self._client = gradserve.connect(address, timeout=30)
        self._arrays = [cupy.array(np.arange(SIZE, dtype=np.float32))]

    def put(self) -> str:
        """Stores an array; returns how it travelled, and whether it came back into another one."""
        out = cupy.empty((SIZE,), np.float32)
        self._client.get(self._client.put(self._arrays[0]), out=out, release=True)
        assert (out.get() == np.arange(SIZE)).all()
        return self._client.server_info().transport.gpu_arrays

    def many(self) -> str:
        """Stores arrays in many allocations, one after the other."""
        held = [cupy.cuda.alloc(1 << 21) for _ in range(40)]
        for each in held:
            self._client.delete(self._client.put(cupy.ndarray((8,), np.float32, each)))
        return self._client.server_info().transport.gpu_arrays

    def pushes(self) -> str:
        """Begins a push_pull that waits for others."""
        model = self._client.gradient_accumulator({"w": gradserve.DenseSpec("float32", (SIZE,))}, shared_name="waits")
        tell("begun")
        model.push_pull({"w": self._arrays[0]}, num_required=2, local_step=0)
        return "ended"


worker = Worker(sys.argv[1])
tell("ready")
for line in sys.stdin:
    tell(getattr(worker, line.strip())())
