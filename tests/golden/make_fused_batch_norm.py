"""Records what TensorFlow's FusedBatchNorm ops compute: writes fused_batch_norm.npz beside this file.

Runs in an environment of its own, which `make golden` makes so:

    python3 -m venv .venv-golden
    .venv-golden/bin/pip install tensorflow-cpu==2.15.1 numpy==1.26.4
    .venv-golden/bin/python -m tests.golden.make_fused_batch_norm
"""

import os

# The ops as documented, without oneDNN's versions of them, and on one thread: the same sums at every run.
os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}

import itertools
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tests.golden.seeded_inputs import DTYPES, batch_norm_inputs, channel_axis, param_dtype

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Images:
    """The shape of x; depth is for 5-D formats only."""

    name: str
    batch: int
    depth: int
    height: int
    width: int
    channels: int
    centre: float = 0.0

    def shape(self, data_format: str) -> tuple[int, ...]:
        sizes = {"N": self.batch, "D": self.depth, "H": self.height, "W": self.width, "C": self.channels}
        return tuple(sizes[axis] for axis in data_format)


IMAGES = (
    Images("ordinary", 2, 2, 3, 4, 6),
    Images("one_channel", 2, 2, 5, 6, 1),
    Images("three_channels", 2, 3, 8, 6, 3),
    Images("one_element_per_channel", 1, 1, 1, 1, 16),
    Images("images_of_7x5", 2, 1, 7, 5, 4),
    Images("many_channels", 2, 1, 1, 2, 130),
    Images("large_mean", 4, 1, 4, 4, 4, centre=32.0),
    Images("no_images", 0, 2, 3, 4, 5),
    Images("no_channels", 2, 2, 3, 4, 0),
)
# Powers of two, which are the same number in float32 and in float64.
FORWARD_MODES = {
    "training": {"is_training": True, "exponential_avg_factor": 1.0, "epsilon": 2.0**-13},
    "training_average": {"is_training": True, "exponential_avg_factor": 0.3, "epsilon": 2.0**-10},
    "training_keep": {"is_training": True, "exponential_avg_factor": 0.0, "epsilon": 2.0**-10},
    "frozen": {"is_training": False, "exponential_avg_factor": 1.0, "epsilon": 2.0**-7},
}
GRADIENT_MODES = {
    "training": {"is_training": True, "epsilon": 2.0**-13},
    "training_arbitrary_moments": {"is_training": True, "epsilon": 2.0**-10},
    "frozen": {"is_training": False, "epsilon": 2.0**-7},
}
FORMATS = ("NHWC", "NCHW", "NDHWC", "NCDHW")
OLDER_VERSIONS = {"": ("float32",), "V2": ("float16", "bfloat16", "float32")}
"""The dtypes of V1 and V2; both know NHWC and NCHW alone."""


@dataclass
class Recording:
    """All cases, and their numbers one after the other, for each dtype of them."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    outputs: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {"uint16": [], "float32": [], "float64": []})

    def add(self, case: dict[str, Any], arrays: Arrays) -> None:
        """Appends a case with the arrays that cannot be made from its seed."""
        self.cases.append(case | {"arrays": {name: [a.dtype.name, a.shape] for name, a in arrays.items()}})
        for array in arrays.values():
            stored = array.view(np.uint16) if array.dtype.itemsize == 2 else array
            self.numbers[stored.dtype.name].append(stored.ravel())

    def write(self, path: Path) -> None:
        about = {"tensorflow": tf.__version__, "numpy": np.__version__}
        manifest = json.dumps(about | {"outputs": self.outputs, "cases": self.cases})
        numbers: dict[str, Any] = {dtype: np.concatenate(arrays) for dtype, arrays in self.numbers.items()}
        np.savez_compressed(path, manifest=manifest, **numbers)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    recording = Recording()
    for dtype, data_format, (index, images) in itertools.product(DTYPES, FORMATS, enumerate(IMAGES)):
        seed, shape = 2015 + index, images.shape(data_format)
        drawn = batch_norm_inputs(seed, shape, dtype, data_format, images.centre)
        case = {
            "dtype": dtype,
            "shape": shape,
            "centre": images.centre,
            "seed": seed,
            "inputs_crc32": zlib.crc32(b"".join(array.tobytes() for array in drawn.values())),
        }
        for mode, attributes in FORWARD_MODES.items():
            name = f"{dtype}-{data_format}-{images.name}-{mode}"
            attributes = attributes | {"data_format": data_format}
            arrays, made_by = forward(recording, dtype, drawn, attributes)
            op = {"op": "FusedBatchNorm", "name": name, "made_by": made_by, "attributes": attributes}
            recording.add(op | case, arrays)
        for mode, attributes in GRADIENT_MODES.items():
            if dtype == "float64" and mode == "training_arbitrary_moments" and drawn["x"].size:
                continue  # Only the op takes moments that are not those of x.
            name = f"{dtype}-{data_format}-{images.name}-{mode}"
            attributes = attributes | {"data_format": data_format}
            own_moments = mode == "training"
            arrays, made_by = gradient(recording, dtype, drawn, attributes, own_moments)
            op = {"op": "FusedBatchNormGrad", "name": name, "made_by": made_by, "attributes": attributes}
            recording.add(op | case, arrays)
    recording.write(Path(__file__).with_name("fused_batch_norm.npz"))


def forward(recording: Recording, dtype: str, drawn: Arrays, attributes: dict[str, Any]) -> tuple[Arrays, str]:
    """Returns what is defined of the outputs, and how it was computed."""
    if dtype == "float64" and drawn["x"].size:
        return float64_forward(drawn, attributes), "float64 expressions"
    names = ("x", "scale", "offset", "mean", "variance")
    inputs = {name: in_op_dtype(drawn[name]) for name in names}
    if attributes["is_training"] and attributes["exponential_avg_factor"] == 1:
        inputs |= {"mean": inputs["mean"][:0], "variance": inputs["variance"][:0]}  # Not read.
    outputs = run(recording, "FusedBatchNorm", inputs, attributes)
    if not attributes["is_training"] or not drawn["x"].size:
        del outputs["reserve_space_1"], outputs["reserve_space_2"]  # TensorFlow leaves them unwritten.
    return in_dtype(outputs, "y", dtype), "float32 op" if dtype == "float64" else "op"


def gradient(
    recording: Recording, dtype: str, drawn: Arrays, attributes: dict[str, Any], own_moments: bool
) -> tuple[Arrays, str]:
    """Returns the outputs, with the moments of x where they are an input, and how they were computed."""
    if dtype == "float64" and drawn["x"].size:
        return float64_gradient(drawn, attributes), "float64 autodiff"
    inputs = {name: in_op_dtype(drawn[name]) for name in ("y_backprop", "x", "scale")}
    moments: Arrays = {}
    if own_moments and drawn["x"].size:
        params = {name: drawn[name] for name in ("x", "scale", "offset", "mean", "variance")}
        saved = run(recording, "FusedBatchNorm", params, attributes)
        moments = {name: saved[name] for name in ("reserve_space_1", "reserve_space_2")}
        inputs |= moments
    else:
        inputs |= {"reserve_space_1": drawn["mean"], "reserve_space_2": drawn["variance"]}
        inputs = {name: in_op_dtype(array) for name, array in inputs.items()}
    made_by = "float32 op" if dtype == "float64" else "op"
    if attributes["is_training"] or channel_axis(attributes["data_format"]) == -1:
        outputs = run(recording, "FusedBatchNormGrad", inputs, attributes)
    else:
        # The op refuses channels first when frozen; TensorFlow's Python gradient transposes around it, too.
        made_by = f"transposed {made_by}"
        images = {name: np.moveaxis(inputs[name], 1, -1) for name in ("y_backprop", "x")}
        last = attributes | {"data_format": attributes["data_format"].replace("C", "") + "C"}
        outputs = run(recording, "FusedBatchNormGrad", inputs | images, last)
        outputs["x_backprop"] = np.moveaxis(outputs["x_backprop"], -1, 1)
    # The op merges two axes of 5-D images, and does not part them again when they are empty.
    outputs["x_backprop"] = outputs["x_backprop"].reshape(inputs["x"].shape)
    return moments | in_dtype(outputs, "x_backprop", dtype), made_by


def run(recording: Recording, op: str, inputs: Arrays, attributes: dict[str, Any]) -> Arrays:
    """Runs V3 of an op, and V1 and V2 where they take such inputs: their numbers must be the same."""
    tensors = {name: tf.constant(array) for name, array in inputs.items()}
    reserve_space_3 = {"reserve_space_3": tf.constant(0.0)} if op == "FusedBatchNormGrad" else {}
    outputs = getattr(tf.raw_ops, f"{op}V3")(**tensors, **reserve_space_3, **attributes)
    recording.outputs[f"{op}V3"] = list(outputs._fields)
    arrays = {name: output.numpy() for name, output in outputs._asdict().items()}
    for version, dtypes in OLDER_VERSIONS.items():
        if inputs["x"].dtype.name in dtypes and attributes["data_format"] in ("NHWC", "NCHW"):
            older = getattr(tf.raw_ops, f"{op}{version}")(**tensors, **attributes)
            recording.outputs[f"{op}{version}"] = list(older._fields)
            for name, output in zip(arrays, older, strict=False):
                unwritten = name in ("reserve_space_1", "reserve_space_2") and (
                    not attributes["is_training"] or not inputs["x"].size
                )
                if not unwritten:
                    np.testing.assert_array_equal(output.numpy(), arrays[name])
    return arrays


def in_op_dtype(array: NDArray[Any]) -> NDArray[Any]:
    """The ops have no float64; it is used for empty x only."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def in_dtype(outputs: Arrays, image: str, dtype: str) -> Arrays:
    """Widens the outputs of a float32 op where T is float64."""
    return {name: a.astype(DTYPES[dtype] if name == image else param_dtype(dtype)) for name, a in outputs.items()}


def float64_forward(drawn: Arrays, attributes: dict[str, Any]) -> Arrays:
    x, scale, offset, mean, variance = (tf.constant(drawn[n]) for n in ("x", "scale", "offset", "mean", "variance"))
    normalised = normalise(x, scale, offset, mean, variance, attributes)
    outputs = {"y": normalised.y, "batch_mean": mean, "batch_variance": variance}
    if attributes["is_training"]:
        count = drawn["x"].size // drawn["scale"].size
        factor = attributes["exponential_avg_factor"]
        unbiased = normalised.variance * (count / max(count - 1, 1))
        outputs |= {
            "batch_mean": (1 - factor) * mean + factor * normalised.mean,
            "batch_variance": (1 - factor) * variance + factor * unbiased,
            "reserve_space_1": normalised.mean,
            "reserve_space_2": normalised.variance,
        }
    return {name: output.numpy() for name, output in outputs.items()} | {"reserve_space_3": np.zeros(())}


def float64_gradient(drawn: Arrays, attributes: dict[str, Any]) -> Arrays:
    """Differentiates the formula; in training through the moments."""
    x, scale, offset, mean, variance = (tf.constant(drawn[n]) for n in ("x", "scale", "offset", "mean", "variance"))
    with tf.GradientTape() as tape:
        tape.watch([x, scale, offset])
        normalised = normalise(x, scale, offset, mean, variance, attributes)
    gradients = tape.gradient(normalised.y, [x, scale, offset], output_gradients=tf.constant(drawn["y_backprop"]))
    names = ("x_backprop", "scale_backprop", "offset_backprop")
    outputs = {name: output.numpy() for name, output in zip(names, gradients, strict=True)}
    placeholders = {"reserve_space_4": np.zeros(0), "reserve_space_5": np.zeros(0)}
    if not attributes["is_training"]:
        return outputs | placeholders
    moments = {"reserve_space_1": normalised.mean.numpy(), "reserve_space_2": normalised.variance.numpy()}
    return moments | outputs | placeholders


@dataclass(frozen=True)
class Normalised:
    y: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def normalise(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, attributes: dict[str, Any]
) -> Normalised:
    """Normalises with the moments of x in training, else with those given."""
    axis = channel_axis(attributes["data_format"]) % x.shape.rank
    others = [other for other in range(x.shape.rank) if other != axis]
    broadcast = [-1 if other == axis else 1 for other in range(x.shape.rank)]
    if attributes["is_training"]:
        mean = tf.reduce_mean(x, others)
        variance = tf.reduce_mean(tf.square(x - tf.reshape(mean, broadcast)), others)
    deviation = tf.reshape(tf.sqrt(variance + attributes["epsilon"]), broadcast)
    y = (x - tf.reshape(mean, broadcast)) / deviation * tf.reshape(scale, broadcast) + tf.reshape(offset, broadcast)
    return Normalised(y, mean, variance)


if __name__ == "__main__":
    main()
