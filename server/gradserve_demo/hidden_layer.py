"""What comes between the two matrices of the network."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from gradserve_demo.arrays import FloatArray, Weights

Backward: TypeAlias = Callable[[FloatArray], tuple[FloatArray, Weights]]
"""Takes the gradient by the outputs; returns those by the inputs, and by each weight of the layer."""


class HiddenLayer(Protocol):
    """A layer from [batch, units] to [batch, units], with weights among those of the network."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs in training, and the way to their gradients."""
        ...

    def infer(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> FloatArray:
        """Returns the outputs outside training; the weights have the layer's `state` among them."""
        ...

    def end_step(self, weights: Mapping[str, FloatArray]) -> None:
        """Is told the new weights, when the gradients of all workers are in them."""
        ...

    def state(self) -> Weights:
        """Returns what the layer has learnt beside the weights."""
        ...


class TanhLayer:
    """A bias and tanh; without state."""

    def forward(self, weights: Mapping[str, FloatArray], inputs: FloatArray) -> tuple[FloatArray, Backward]:
        """Returns the outputs, from which the gradients follow."""
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
        """Nothing is left to do."""

    def state(self) -> Weights:
        """Returns nothing: there is none."""
        return {}
