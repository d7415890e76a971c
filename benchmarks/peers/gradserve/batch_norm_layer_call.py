"""A training step of the batch normalization layer by a gradserve server, on tensors that are on the server."""

from __future__ import annotations

from typing import Any

import gradserve
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm_layer import DECAY, EPSILON, LayerInputs, StepResult


class LayerWorker(Worker):
    """Makes three calls per step: forward, backward and the updates. The results stay on the server."""

    def __init__(self, setup: Setup) -> None:
        self._inputs = inputs = LayerInputs(setup)
        self._client = gradserve.connect(setup.server["address"], timeout=60)
        self._x, self._dy = (self._client.put(array) for array in (inputs.x, inputs.dy))
        self._layer = self._client.batch_norm(
            decay=DECAY,
            scale=True,
            epsilon=EPSILON,
            activation_fn=inputs.activation or None,
            param_initializers={"beta": inputs.beta, "gamma": inputs.gamma},
        )
        self._num_steps = 0
        self._results: list[Any] = []

    def step(self) -> None:
        forward = self._layer.forward(self._x, keep=True)
        gradients = self._layer.backward(self._dy, forward, keep=True)
        self._layer.run_updates()
        self._num_steps += 1
        self._results = [forward.outputs, gradients.inputs, gradients.beta, gradients.gamma]

    def settle(self) -> None:
        self._client.delete(*self._results)
        self._results = []

    def check(self) -> None:
        arrays = [self._client.get(handle) for handle in self._results]
        averages = self._layer.get_variables("moving_mean", "moving_variance")
        self._inputs.check(StepResult(*arrays, **averages), self._num_steps)


if __name__ == "__main__":
    run_worker(LayerWorker, packages=["gradserve", "grpcio", "protobuf", "numba", "numpy"])
