"""Recurrent networks by gradserve's kernels, without a server, in this process."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.cudnn_rnn import CudnnRnnInputs
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.products import use_one_blas_thread
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import plan_backprop, plan_forward
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import BackpropInputs, ForwardAttributes, ForwardInputs
from gradserve_server.runtime.process import keep_freed_memory


class CudnnRnnWorker(Worker):
    """Makes a forward and a backward call per step, with outputs from the pool, as in the server."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        use_one_blas_thread()
        self._kernels = CpuCudnnRnn(
            CpuDevice(BufferPool(1 << 30)), ForkJoin(setup.options["num_threads"]), ReserveKey()
        )
        self._kernels.prepare(lambda: False)
        self._inputs = inputs = CudnnRnnInputs(setup)
        cells = inputs.states if inputs.mode == "lstm" else None
        self._attributes = ForwardAttributes(rnn_mode=inputs.mode)
        self._forward_inputs = ForwardInputs(inputs.x, inputs.states, inputs.params, cells)
        self._gradients = {
            "output_backprop": inputs.d_output,
            "output_h_backprop": np.zeros_like(inputs.states),
            "output_c_backprop": cells,
        }

    def step(self) -> None:
        problem = plan_forward(self._forward_inputs, self._attributes).problem
        self._outputs = self._kernels.forward(self._forward_inputs, problem)
        arrays = BackpropInputs(**vars(self._forward_inputs), **vars(self._outputs), **self._gradients)
        self._result = self._kernels.backprop(arrays, plan_backprop(arrays, self._attributes).problem)

    def settle(self) -> None:
        del self._outputs, self._result

    def check(self) -> None:
        self._inputs.check(self._outputs.output, self._result.input_backprop, self._result.params_backprop)


if __name__ == "__main__":
    run_worker(CudnnRnnWorker, packages=["gradserve", "numba", "numpy"])
