"""Inputs of the GRUBlockCell benchmarks, and the check of results.

NumPy only: this module runs in the environment of every peer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from benchmarks.peers.driver import Setup

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_TOLERANCE = 1e-4


class GRUInputs:
    """The inputs of GRUBlockCell and GRUBlockCellGrad, as float32; the gates are the forward call's."""

    def __init__(self, setup: Setup) -> None:
        self.is_gradient = setup.options["op"] == "gradient"
        batch, inputs, cells = (int(setup.options[name]) for name in ("batch", "inputs", "cells"))
        rows = inputs + cells
        random = np.random.RandomState(0)

        def normal(*shape: int) -> Array:
            return random.standard_normal(shape).astype(np.float32)

        self.cell: dict[str, Array] = {
            "x": normal(batch, inputs),
            "h_prev": normal(batch, cells),
            "w_ru": normal(rows, 2 * cells) / np.float32(rows**0.5),
            "w_c": normal(rows, cells) / np.float32(rows**0.5),
            "b_ru": np.ones(2 * cells, np.float32),
            "b_c": np.zeros(cells, np.float32),
        }
        self._forward()
        gates = {"r": self._r, "u": self._u, "c": self._c}
        self.gradient: dict[str, Array] = {
            **self.cell,
            **{name: gate.astype(np.float32) for name, gate in gates.items()},
            "d_h": normal(batch, cells),
        }

    def check(self, result: Any) -> None:
        """Raises AssertionError unless `result` is h, or the gradient with respect to h_prev."""
        expected = self._d_h_prev() if self.is_gradient else self._h
        error = np.abs(np.asarray(result, np.float64) - expected).max() / np.abs(expected).max()
        assert error < _TOLERANCE, f"wrong result: relative error {error:.2g}"

    def _forward(self) -> None:
        x, h_prev, w_ru, w_c, b_ru, b_c = (array.astype(np.float64) for array in self.cell.values())
        gates = 1 / (1 + np.exp(-(np.concatenate([x, h_prev], 1) @ w_ru + b_ru)))
        self._r, self._u = np.split(gates, 2, axis=1)
        self._c = np.tanh(np.concatenate([x, h_prev * self._r], 1) @ w_c + b_c)
        self._h = self._u * h_prev + (1 - self._u) * self._c

    def _d_h_prev(self) -> Array:
        arrays = {name: array.astype(np.float64) for name, array in self.gradient.items()}
        inputs, h_prev, d_h = arrays["x"].shape[1], arrays["h_prev"], arrays["d_h"]
        r, u, c = self._r, self._u, self._c
        d_c_bar = d_h * (1 - u) * (1 - c * c)
        d_hr = d_c_bar @ arrays["w_c"][inputs:].T
        d_bars = np.concatenate([d_hr * h_prev * r * (1 - r), d_h * (h_prev - c) * u * (1 - u)], 1)
        d_h_prev: Array = d_bars @ arrays["w_ru"][inputs:].T + d_hr * r + d_h * u
        return d_h_prev
