"""Inputs of the benchmarks of recurrent networks, and the check of results.

NumPy only: this module runs in the environment of every peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.peers.driver import Setup

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Wide: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]

NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1}
STEPS, UNITS, LAYERS = 100, 256, 2
_TOLERANCE = 1e-4
_DIFFERENCE = 1e-5


class CudnnRnnInputs:
    """A network of `LAYERS` layers, sequences, and gradients of its outputs: float32, time first, all states 0.

    Attributes:
        matrices: For each layer W, [G * UNITS, UNITS], and R, likewise.
        biases: For each layer bW and bR, [G * UNITS].
        x: The input, [STEPS, batch, UNITS].
        d_output: The gradient of the output, likewise.
        states: The initial states, [LAYERS, batch, UNITS], zeros.
    """

    def __init__(self, setup: Setup) -> None:
        self.mode = str(setup.options["mode"])
        batch = int(setup.options["batch"])
        rows = NUM_GATES[self.mode] * UNITS
        random = np.random.RandomState(0)

        def draw(*shape: int) -> Array:
            drawn: Array = (random.uniform(-1, 1, shape) / np.sqrt(UNITS)).astype(np.float32)
            return drawn

        self.matrices = [(draw(rows, UNITS), draw(rows, UNITS)) for _ in range(LAYERS)]
        self.biases = [(draw(rows), draw(rows)) for _ in range(LAYERS)]
        self.x, self.d_output = (random.standard_normal((STEPS, batch, UNITS)).astype(np.float32) for _ in range(2))
        self.states: Array = np.zeros((LAYERS, batch, UNITS), np.float32)

    @property
    def params(self) -> Array:
        """The parameter vector of CudnnRNN."""
        return flat_params(self.matrices, self.biases)

    def check(self, output: Any, d_x: Any, d_params: Any) -> None:
        """Raises AssertionError unless these are the outputs of the last layer and the gradients.

        The gradients are compared with a difference quotient in a random direction.
        """
        expected = self._output(self.x.astype(np.float64), self.params.astype(np.float64))
        error = np.abs(np.asarray(output, np.float64) - expected).max() / np.abs(expected).max()
        assert error < _TOLERANCE, f"wrong output: relative error {error:.2g}"
        random = np.random.RandomState(1)
        to_x, to_params = random.standard_normal(self.x.shape), random.standard_normal(self.params.shape)
        higher, lower = (
            np.sum(self._output(self.x + step * to_x, self.params + step * to_params) * self.d_output)
            for step in (_DIFFERENCE, -_DIFFERENCE)
        )
        slope = (higher - lower) / (2 * _DIFFERENCE)
        parts = np.sum(np.asarray(d_x, np.float64) * to_x), np.sum(np.asarray(d_params, np.float64) * to_params)
        size = np.linalg.norm(d_x) + np.linalg.norm(d_params)
        error = abs(sum(parts) - slope) / size
        assert error < _TOLERANCE, f"wrong gradients: relative error {error:.2g}"

    def _output(self, x: Wide, params: Wide) -> Wide:
        rows = NUM_GATES[self.mode] * UNITS
        size = rows * UNITS
        biases = params[2 * LAYERS * size :].reshape(LAYERS, 2, rows)
        for layer in range(LAYERS):
            w, r = params[2 * layer * size : 2 * (layer + 1) * size].reshape(2, rows, UNITS)
            x = self._layer(x, w, r, *biases[layer])
        return x

    def _layer(self, x: Wide, w: Wide, r: Wide, input_bias: Wide, recurrent_bias: Wide) -> Wide:
        from_x = x @ w.T + input_bias
        h = c = np.zeros(x.shape[1:])
        outputs = []
        for each in from_x:
            q = h @ r.T + recurrent_bias
            if self.mode == "lstm":
                i, f, n, o = np.split(each + q, 4, axis=1)
                c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(n)
                h = _sigmoid(o) * np.tanh(c)
            elif self.mode == "gru":
                gates = _sigmoid(each[:, : 2 * UNITS] + q[:, : 2 * UNITS])
                n = np.tanh(each[:, 2 * UNITS :] + gates[:, :UNITS] * q[:, 2 * UNITS :])
                h = n + gates[:, UNITS:] * (h - n)
            else:
                h = np.tanh(each + q)
            outputs.append(h)
        return np.stack(outputs)


def flat_params(matrices: Sequence[Sequence[Any]], biases: Sequence[Sequence[Any]]) -> Array:
    """Returns parameters, or their gradients, in the order of CudnnRNN: first all matrices, then all biases."""
    flat: Array = np.concatenate([np.ravel(array) for layer in (*matrices, *biases) for array in layer])
    return flat


def _sigmoid(x: Wide) -> Wide:
    return 1 / (1 + np.exp(-x))
