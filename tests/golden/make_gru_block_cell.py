"""Records what TensorFlow's GRUBlockCell ops compute: writes gru_block_cell.npz beside this file.

float32 comes from the raw ops. They do not take float64: for that TensorFlow computes the equations, and their
gradients, those of the weights included, by automatic differentiation. For the environment that this runs in see
make_fused_batch_norm.py.
"""

import os

# One thread and no oneDNN: the same sums at every run.
os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tests.golden.seeded_gru_inputs import CELLS, gru_inputs

Arrays = dict[str, NDArray[Any]]

FORWARD = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")
GATES = ("r", "u", "c")


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    outputs: dict[str, Arrays] = {}
    checksums = {}
    for cell in CELLS:
        for dtype in ("float32", "float64"):
            drawn = gru_inputs(cell, dtype)
            checksums[f"{dtype}-{cell}"] = zlib.crc32(b"".join(array.tobytes() for array in drawn.values()))
        single = gru_inputs(cell, "float32")
        forward = run("GRUBlockCell", {name: single[name] for name in FORWARD})
        own_gates = {name: forward[name] for name in GATES}
        outputs[f"float32-{cell}-forward"] = forward
        for name, gates in (("gradient", own_gates), ("gradient_of_other_gates", {})):
            gradient = run("GRUBlockCellGrad", single | gates)
            if not cell.cells:
                del gradient["d_x"]  # TensorFlow leaves it unwritten.
            outputs[f"float32-{cell}-{name}"] = gradient
        forward, gradient = differentiate(gru_inputs(cell, "float64"))
        outputs[f"float64-{cell}-forward"], outputs[f"float64-{cell}-gradient"] = forward, gradient
    about = {"tensorflow": tf.__version__, "numpy": np.__version__, "inputs_crc32": checksums}
    names = {name: list(arrays) for name, arrays in outputs.items()}
    flat: dict[str, Any] = {
        name: np.concatenate([array.ravel() for array in arrays.values()]) for name, arrays in outputs.items()
    }
    path = Path(__file__).with_name("gru_block_cell.npz")
    np.savez_compressed(path, manifest=json.dumps(about | {"outputs": names}), **flat)


def run(op: str, inputs: Arrays) -> Arrays:
    outputs = getattr(tf.raw_ops, op)(**{name: tf.constant(array) for name, array in inputs.items()})
    return {name: output.numpy() for name, output in outputs._asdict().items()}


def differentiate(drawn: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the outputs of both ops, that of weights and biases included, for the gates of the forward call."""
    x, h_prev, w_ru, w_c, b_ru, b_c = (tf.constant(drawn[name]) for name in FORWARD)
    # Added to what sigmoid and tanh are taken of: the gradients with respect to these are those of the sums.
    to_ru_bar, to_c_bar = tf.zeros_like(tf.concat([h_prev, h_prev], 1)), tf.zeros_like(h_prev)
    sources = [x, h_prev, to_c_bar, to_ru_bar, w_ru, w_c, b_ru, b_c]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        ru = tf.sigmoid(tf.concat([x, h_prev], 1) @ w_ru + b_ru + to_ru_bar)
        r, u = tf.split(ru, 2, axis=1)
        c = tf.tanh(tf.concat([x, h_prev * r], 1) @ w_c + b_c + to_c_bar)
        h = u * h_prev + (1 - u) * c
    gradients = tape.gradient(h, sources, output_gradients=tf.constant(drawn["d_h"]))
    names = ("d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar", "d_w_ru", "d_w_c", "d_b_ru", "d_b_c")
    forward = dict(zip(("r", "u", "c", "h"), (r, u, c, h), strict=True))
    backward = dict(zip(names, gradients, strict=True))
    return (
        {name: output.numpy() for name, output in forward.items()},
        {name: output.numpy() for name, output in backward.items()},
    )


if __name__ == "__main__":
    main()
