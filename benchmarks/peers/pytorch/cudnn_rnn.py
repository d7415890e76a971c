"""Recurrent networks by PyTorch's modules and autograd, in this process."""

from __future__ import annotations

import torch

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.cudnn_rnn import LAYERS, UNITS, CudnnRnnInputs, flat_params

_MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


class CudnnRnnWorker(Worker):
    """Runs the module, and then the gradients of all its inputs and parameters."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.options["num_threads"])
        self._inputs = inputs = CudnnRnnInputs(setup)
        self._module = _MODULES[inputs.mode](UNITS, UNITS, LAYERS)
        with torch.no_grad():
            for layer in range(LAYERS):
                for kind, arrays in (("weight", inputs.matrices[layer]), ("bias", inputs.biases[layer])):
                    for name, array in zip(("ih", "hh"), arrays, strict=True):
                        getattr(self._module, f"{kind}_{name}_l{layer}").copy_(torch.from_numpy(array))
        self._x = torch.from_numpy(inputs.x).requires_grad_()
        state, cell = (torch.from_numpy(inputs.states).clone().requires_grad_() for _ in range(2))
        is_lstm = inputs.mode == "lstm"
        self._states = (state, cell) if is_lstm else state
        self._d_output = torch.from_numpy(inputs.d_output)
        self._wanted = [self._x, *((state, cell) if is_lstm else (state,)), *self._module.parameters()]

    def step(self) -> None:
        self._output, _ = self._module(self._x, self._states)
        self._gradients = torch.autograd.grad(self._output, self._wanted, self._d_output)

    def settle(self) -> None:
        del self._output, self._gradients

    def check(self) -> None:
        params = [gradient.numpy() for gradient in self._gradients[-4 * LAYERS :]]
        layers = [params[4 * layer : 4 * layer + 4] for layer in range(LAYERS)]
        d_params = flat_params([layer[:2] for layer in layers], [layer[2:] for layer in layers])
        self._inputs.check(self._output.detach().numpy(), self._gradients[0].numpy(), d_params)


if __name__ == "__main__":
    run_worker(CudnnRnnWorker, packages=["torch"])
