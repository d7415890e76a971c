"""Calls the layer itself, tf_slim.layers.batch_norm, for the scripts that record what it does.

tf_slim imports modules of Keras by their old names. Keras has other names for them since 2.13.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

# One thread and no oneDNN: the same sums at every run.
os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}

import tensorflow as tf
import tensorflow.compat.v1 as tf1

for _module in ("", ".base", ".convolutional", ".core", ".pooling", ".normalization"):
    sys.modules[f"keras.legacy_tf_layers{_module}"] = importlib.import_module(f"keras.src.legacy_tf_layers{_module}")

tf_slim = importlib.import_module("tf_slim")

__all__ = ["VERSIONS", "batch_norm", "tf", "tf1"]  # TensorFlow is imported from here, after the above

REGULARIZERS: dict[str, Callable[..., Any]] = {
    "l1": lambda l1: tf_slim.l1_regularizer(l1),
    "l2": lambda l2: tf_slim.l2_regularizer(l2),
    "l1_l2": lambda l1, l2: tf_slim.l1_l2_regularizer(l1, l2),
}
VERSIONS = {"tensorflow": tf.__version__, "tf_slim": importlib.metadata.version("tf_slim")}


def batch_norm(x: Any, arguments: Mapping[str, Any], **of_the_call: Any) -> Any:
    """Returns the layer's output for arguments in the form of `layer_arguments`."""
    translated = dict(arguments)
    if arguments.get("updates_collections") == tf1.GraphKeys.UPDATE_OPS:
        # The layer asks for this very object.
        translated["updates_collections"] = tf1.GraphKeys.UPDATE_OPS
    if (initializers := arguments.get("param_initializers")) is not None:
        translated["param_initializers"] = {
            name: tf1.constant_initializer(array) for name, array in initializers.items()
        }
    if (regularizers := arguments.get("param_regularizers")) is not None:
        translated["param_regularizers"] = {name: _regularizer(plain) for name, plain in regularizers.items()}
    if (activation := arguments.get("activation_fn")) is not None:
        translated["activation_fn"] = getattr(tf.nn, activation)
    return tf_slim.layers.batch_norm(x, **translated, **of_the_call)


def _regularizer(plain: Mapping[str, Any]) -> Any:
    kind, scales = plain["regularizer"]
    return REGULARIZERS[kind](**scales)
