"""The accuracy that the pages of recurrent ops promise, at the ends of the ranges for which they promise it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve

pytestmark = pytest.mark.usefixtures("_prepared_ops")

ENDS_OF_INPUTS, ENDS_OF_GRADIENTS = (1e-12, 1.0), (1e-12, 1.0, 1e25)
BATCH, SIZE, UNITS, STEPS = 8, 16, 16, 20


def random(generator: np.random.Generator, shape: Sequence[int], magnitude: float) -> NDArray[np.float32]:
    """Returns numbers whose magnitude is between half of the given one and all of it."""
    values = generator.uniform(0.5, 1, shape) * generator.choice([-1, 1], shape) * magnitude
    return np.asarray(values, np.float32)


def exact(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: each.astype(np.float64) for name, each in arrays.items()}


def errors(got: Iterable[Any], expected: Iterable[Any]) -> list[float]:
    """Returns the largest error of each array, relative to its largest magnitude."""
    return [
        float(np.abs(mine - theirs).max() / np.abs(theirs).max())
        for mine, theirs in zip(got, expected, strict=True)
        if np.any(theirs)
    ]


@pytest.mark.parametrize("gradient", ENDS_OF_GRADIENTS)
@pytest.mark.parametrize("magnitude", ENDS_OF_INPUTS)
def test_gru_block_cell(client: gradserve.Client, magnitude: float, gradient: float) -> None:
    generator = np.random.default_rng(0)
    rows = SIZE + UNITS
    arrays: dict[str, Any] = {
        "x": random(generator, (BATCH, SIZE), magnitude),
        "h_prev": random(generator, (BATCH, UNITS), magnitude),
        "w_ru": random(generator, (rows, 2 * UNITS), 0.25),
        "w_c": random(generator, (rows, UNITS), 0.25),
        "b_ru": random(generator, (2 * UNITS,), 1),
        "b_c": random(generator, (UNITS,), 1),
    }
    d_h = random(generator, (BATCH, UNITS), gradient)
    outputs, expected = client.raw_ops.GRUBlockCell(**arrays), client.raw_ops.GRUBlockCell(**exact(arrays))
    assert max(errors(outputs, expected)) < 1e-5
    given = {**arrays, "r": outputs.r, "u": outputs.u, "c": outputs.c, "d_h": d_h}
    gradients = client.raw_ops.GRUBlockCellGrad(**given, weight_gradients=True)
    right = client.raw_ops.GRUBlockCellGrad(**exact(given), weight_gradients=True)
    assert max(errors(gradients, right)) < 1e-5


@pytest.mark.parametrize("gradient", ENDS_OF_GRADIENTS)
@pytest.mark.parametrize("magnitude", ENDS_OF_INPUTS)
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_cudnn_rnn(client: gradserve.Client, mode: str, magnitude: float, gradient: float) -> None:
    generator = np.random.default_rng(0)
    length = client.raw_ops.CudnnRNNParamsSize(num_layers=1, num_units=UNITS, input_size=SIZE, rnn_mode=mode)
    arrays: dict[str, Any] = {
        "input": random(generator, (STEPS, BATCH, SIZE), magnitude),
        "input_h": random(generator, (1, BATCH, UNITS), magnitude),
        "params": random(generator, (int(length[0]),), 0.25),
    }
    gradients: dict[str, Any] = {
        "output_backprop": random(generator, (STEPS, BATCH, UNITS), gradient),
        "output_h_backprop": random(generator, (1, BATCH, UNITS), gradient),
    }
    if mode == "lstm":
        arrays["input_c"] = random(generator, (1, BATCH, UNITS), magnitude)
        gradients["output_c_backprop"] = random(generator, (1, BATCH, UNITS), gradient)

    def computed(inputs: dict[str, Any], gradients: dict[str, Any]) -> tuple[Any, Any]:
        forward = client.raw_ops.CudnnRNNV3(**inputs, rnn_mode=mode)
        saved: dict[str, Any] = {"reserve_space": forward.reserve_space, "host_reserved": forward.host_reserved}
        cells: dict[str, Any] = {"output_c": forward.output_c} if mode == "lstm" else {}
        outputs: dict[str, Any] = {"output": forward.output, "output_h": forward.output_h, **cells}
        return outputs.values(), client.raw_ops.CudnnRNNBackpropV3(
            **inputs, **outputs, **gradients, **saved, rnn_mode=mode
        )

    (outputs, backward), (right, right_backward) = (
        computed(arrays, gradients),
        computed(exact(arrays), exact(gradients)),
    )
    assert max(errors(outputs, right)) < 5e-6
    assert max(errors(backward, right_backward)) < 5e-6
