"""A good call of every method that takes an argument, on either face."""

import atexit
import inspect
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
import gradserve.aio


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


_FOLDER = Path(tempfile.mkdtemp())
"""The folder that parameters are saved to. One for the process, as calls are tables, which have no fixtures."""
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

LAST_STEP = (1 << 63) - 1
NOW = {"timeout": 0}

IMAGES = {"x": ones(2, 2, 2, 3), "scale": ones(3)}
NORMALIZE = {**IMAGES, "offset": ones(3), "mean": [], "variance": []}
NORMALIZE_GRAD = {**IMAGES, "y_backprop": ones(2, 2, 2, 3), "reserve_space_1": ones(3), "reserve_space_2": ones(3)}

GRU = {
    "x": ones(2, 3),
    "h_prev": ones(2, 4),
    "w_ru": ones(7, 8),
    "w_c": ones(7, 4),
    "b_ru": ones(8),
    "b_c": ones(4),
}
GRU_GRAD = GRU | {"r": ones(2, 4), "u": ones(2, 4), "c": ones(2, 4), "d_h": ones(2, 4)}

LAYER_NORM = {"x": ones(2, 3), "scale": ones(3)}
LAYER_NORM_GRAD = LAYER_NORM | {"y_backprop": ones(2, 3), "mean": ones(2), "rstd": ones(2)}

RNN = {"input": ones(1, 1, 3), "input_h": ones(1, 1, 2), "input_c": ones(1, 1, 2), "params": ones(56)}
RNN_GRAD = RNN | {
    f"{name}{gradient}": ones(1, 1, 2) for name in ("output", "output_h", "output_c") for gradient in ("", "_backprop")
}
RNN_SIZES: dict[str, Any] = {"num_layers": 1, "num_units": 2, "input_size": 3}
RNN_CANONICAL = RNN_SIZES | {"weights": [ones(2, 3)] * 4 + [ones(2, 2)] * 4, "biases": [ones(2)] * 8}

REQUIRED: dict[str, dict[str, Any]] = {
    "client.conditional_accumulator": {"dtype": "float32"},
    "client.sparse_conditional_accumulator": {"dtype": "float32"},
    "client.gradient_accumulator": {"components": {"w": np.zeros(2)}},
    "client.delete_accumulator": {"name": "nobody's"},
    "client.delete_batch_norm_layer": {"scope": "nobody's"},
    "client.put": {"value": 1.0},
    "client.empty": {"shape": (2, 3), "dtype": "float32"},
    "client.put_all": {"values": [1.0]},
    "dense.apply_grad": {"grad": 1.0, "local_step": LAST_STEP},
    "dense.take_grad": {"num_required": 1, **NOW},
    "dense.read_average": NOW,
    "dense.set_global_step": {"new_global_step": 1},
    "sparse.apply_grad": {"grad_indices": [0], "grad_values": [1.0], "local_step": LAST_STEP},
    "sparse.apply_indexed_slices_grad": {"grad": gradserve.IndexedSlices(ones(1), np.array([0]))},
    "sparse.take_grad": {"num_required": 1, **NOW},
    "sparse.take_indexed_slices_grad": {"num_required": 1, **NOW},
    "sparse.read_average": NOW,
    "sparse.set_global_step": {"new_global_step": 1},
    "model.apply_grad": {"grads": {"w": [1, 2]}, "local_step": LAST_STEP},
    "model.take_grad": {"num_required": 1, **NOW},
    "model.read_average": NOW,
    "model.set_global_step": {"new_global_step": 1},
    "model.push_pull": {"grads": {"w": [1, 2]}, "num_required": 1, "local_step": LAST_STEP, "worker_id": "", **NOW},
    "client.parameters": {"values": {"w": np.zeros(2)}},
    "client.delete_parameters": {"name": "nobody's"},
    "parameters.read": NOW,
    "parameters.push": {"update": {"w": [1, 2]}, "local_step": 0},
    "parameters.push_pull": {"update": {"w": [1, 2]}, "local_step": 0, "worker_id": "", **NOW},
    "parameters.wait": {"step": 0, **NOW},
    "parameters.report": {"metrics": {"loss": 1.0}, "step": 0},
    "parameters.evaluate": {"fn": lambda _: {"loss": 1.0}, "until": 0, "stop": lambda: True},
    "parameters.change": {"num_required": 1},
    "parameters.save": {"path": _FOLDER / "saved again"},
    "layer.__call__": {"inputs": ones(2, 3)},
    "layer.forward": {"inputs": ones(2, 3)},
    "layer.backward": {"dy": ones(2, 3)},
    "layer.set_variables": {"values": {"beta": np.zeros(3)}},
    **{f"raw_ops.FusedBatchNorm{version}": NORMALIZE for version in ("", "V2", "V3")},
    **{f"raw_ops.FusedBatchNormGrad{version}": NORMALIZE_GRAD for version in ("", "V2", "V3")},
    "raw_ops.GRUBlockCell": GRU,
    "raw_ops.GRUBlockCellGrad": GRU_GRAD,
    "raw_ops.LayerNorm": LAYER_NORM | {"offset": ones(3)},
    "raw_ops.LayerNormGrad": LAYER_NORM_GRAD,
    **{f"raw_ops.CudnnRNN{version}": RNN for version in ("", "V2", "V3")},
    **{f"raw_ops.CudnnRNNBackprop{version}": RNN_GRAD for version in ("", "V2", "V3")},
    "raw_ops.CudnnRNNParamsSize": RNN_SIZES,
    **{f"raw_ops.CudnnRNNCanonicalToParams{version}": RNN_CANONICAL for version in ("", "V2")},
    "raw_ops.CudnnRNNParamsToCanonical": RNN_SIZES | {"params": ones(56), "num_params": 8},
    "raw_ops.CudnnRNNParamsToCanonicalV2": RNN_SIZES
    | {"params": ones(56), "num_params_weights": 8, "num_params_biases": 8},
    **{
        f"raw_ops.{kind}ConditionalAccumulator": {"dtype": "float32", "shape": None}
        for kind in ("", "Resource", "Sparse")
    },
    **{
        f"raw_ops.{kind}AccumulatorApplyGradient": {"local_step": LAST_STEP, "gradient": np.float32(1)}
        for kind in ("", "Resource")
    },
    **{
        f"raw_ops.{kind}AccumulatorTakeGradient": {"num_required": 1, "dtype": "float32", **NOW}
        for kind in ("", "Resource", "Sparse")
    },
    "raw_ops.SparseAccumulatorApplyGradient": {
        "local_step": LAST_STEP,
        "gradient_indices": [0],
        "gradient_values": [1.0],
        "gradient_shape": [1],
        "has_known_shape": True,
    },
    **{f"raw_ops.{kind}AccumulatorSetGlobalStep": {"new_global_step": 1} for kind in ("", "Resource")},
}
"""The arguments without which a method cannot be called, or would wait; by object and name.

Those that name something on the server are added when it is there.
"""


@dataclass(frozen=True)
class Things:
    """What there is to be called, and to be passed."""

    objects: dict[str, Any]
    handle: gradserve.TensorHandle
    reserve_space: dict[str, Any]
    file: Path

    def method(self, name: str) -> Any:
        """Returns a method by object and name."""
        thing, _, method = name.partition(".")
        return getattr(self.objects[thing], method)

    def arguments(self, name: str) -> dict[str, Any]:
        """Returns the arguments of a good call."""
        own: dict[str, Any] = {
            "handle": self.objects["sparse" if ".Sparse" in name else "dense"],
            "resource": self.objects["deleted"],
            **self.reserve_space,
        }
        if name == "client.get":
            own["handle"] = self.handle
        if name == "client.get_all":
            own["handles"] = [self.handle]
        if name == "parameters.load":
            own["path"] = self.file
        if name == "parameters.fork":
            own["shared_name"] = uuid.uuid4().hex
        taken = inspect.signature(self.method(name)).parameters
        return {each: value for each, value in own.items() if each in taken} | REQUIRED.get(name, {})


async def make_things(client: Any) -> Things:
    objects = {
        "client": client,
        "raw_ops": client.raw_ops,
        "dense": await value_of(client.conditional_accumulator("float32", ())),
        "deleted": await value_of(client.conditional_accumulator("float32", ())),
        "sparse": await value_of(client.sparse_conditional_accumulator("float32")),
        "model": await value_of(client.gradient_accumulator({"w": np.zeros(2)})),
        "parameters": await value_of(client.parameters({"w": np.zeros(2)})),
        "layer": await value_of(client.batch_norm()),
    }
    file = _FOLDER / f"saved {uuid.uuid4().hex}"
    await value_of(objects["parameters"].save(file))
    outputs = await value_of(client.raw_ops.CudnnRNNV3(**RNN))
    reserve_space = {"reserve_space": outputs.reserve_space, "host_reserved": outputs.host_reserved}
    return Things(objects, await value_of(client.put([1.0])), reserve_space, file)


async def make_ready(things: Things, method: str) -> None:
    """Sees to it that a call that would wait need not."""
    thing, _, name = method.partition(".")
    if thing == "parameters":
        return
    if thing == "raw_ops":
        thing = "sparse" if name.startswith("Sparse") else "dense"
    calls: dict[str, tuple[str, ...]] = {
        "take": ("apply_grad",),
        "read": ("apply_grad", "take_grad"),
        "backward": ("forward",),
        "set_variables": ("forward",),
    }
    for word, needed in calls.items():
        if word in name.lower():
            for each in needed:
                await value_of(things.method(f"{thing}.{each}")(**things.arguments(f"{thing}.{each}")))


async def value_of(result: Any) -> Any:
    """Returns what a method of either face returns."""
    return await result if inspect.isawaitable(result) else result


def methods(face: Any) -> list[str]:
    """Returns the methods of a face that take an argument, by object and name; without the end of everything."""
    kinds = {
        "client": face.Client,
        "raw_ops": face.RawOps,
        "dense": face.ConditionalAccumulator,
        "sparse": face.SparseConditionalAccumulator,
        "model": face.GradientAccumulator,
        "parameters": face.Parameters,
        "layer": face.BatchNormLayer,
    }
    return [
        f"{thing}.{name}"
        for thing, kind in kinds.items()
        for name, method in inspect.getmembers(kind, callable)
        if (not name.startswith("_") or (name == "__call__" and thing == "layer"))
        and len(inspect.signature(method).parameters) > 1
        and name != "close"  # after which there is nothing to call
    ]
