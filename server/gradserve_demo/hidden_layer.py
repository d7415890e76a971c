"""The layer between the two matrices of the network."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from gradserve_demo.arrays import FloatArray, Weights

Backward: TypeAlias = Callable[[FloatArray], tuple[FloatArray, Weights]]
"""Takes the gradient of the outputs; returns the gradients of the inputs and of each of the layer's weights."""


class HiddenLayer(Protocol):
    """A layer from [batch, units] to [batch, units], whose weights are among the network's."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs in training, and the function that computes their gradients."""
        ...

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Returns the outputs outside training; the weights include the layer's `state`."""
        ...

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Takes the new weights, once the gradients of all workers have been applied."""
        ...

    def state(self) -> Weights:
        """Returns what the layer has learnt in addition to the weights."""
        ...


class TanhLayer:
    """A bias and tanh, without state."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs and the function that computes their gradients."""
        outputs = self.infer(weights, inputs)

        def backward(d_outputs: FloatArray) -> tuple[FloatArray, Weights]:
            d_inputs = d_outputs * (1 - outputs * outputs)
            return d_inputs, {"hidden_bias": d_inputs.sum(axis=0)}

        return outputs, backward

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Returns the same as in training."""
        outputs: FloatArray = np.tanh(inputs + weights["hidden_bias"])
        return outputs

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Does nothing."""

    def state(self) -> Weights:
        """Returns an empty dict: there is no state."""
        return {}
