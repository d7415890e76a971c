"""Records what TensorFlow's activation functions compute: writes activation.npz beside this file.

In float64, and gradients by automatic differentiation. For the environment that this runs in see
make_fused_batch_norm.py.
"""

import os

os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.golden.activation import INPUTS

FUNCTIONS = {
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "tanh": tf.nn.tanh,
    "sigmoid": tf.nn.sigmoid,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "softplus": tf.nn.softplus,
    "softsign": tf.nn.softsign,
    "leaky_relu": tf.nn.leaky_relu,
    "gelu": tf.nn.gelu,
    "swish": tf.nn.swish,
}


def main() -> None:
    recorded: dict[str, Any] = {}
    for name, function in FUNCTIONS.items():
        x = tf.constant(INPUTS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        recorded[name] = np.stack([y.numpy(), tape.gradient(y, x).numpy()])
    np.savez_compressed(Path(__file__).with_name("activation.npz"), **recorded)


if __name__ == "__main__":
    main()
