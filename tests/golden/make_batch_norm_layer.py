"""Records what the batch_norm layer of tf_slim computes: writes batch_norm_layer.npz beside this file.

Each case runs as it is and, but for float64, once more unfused in float64 and from the same numbers. What is fused
feeds moving_variance with the variance times M / (M - 1), so what unfused float64 gives is corrected by this.
TensorFlow has no fused op for bfloat16 on CPUs: there the op runs in float32, and what is an image is rounded.
`make golden` runs this in an environment of its own.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.batch_norm_layer_calls import CALLS
from tests.golden.seeded_inputs import DTYPES
from tests.golden.seeded_layer_inputs import (
    RECORDED_UPDATES,
    LayerCall,
    LayerInputs,
    inputs_crc32,
    layer_arguments,
    layer_inputs,
)
from tests.golden.tf_batch_norm_layer import VERSIONS, batch_norm, tf, tf1

Arrays = dict[str, NDArray[Any]]

SCOPE = "layer"
BFLOAT16 = tf.bfloat16.as_numpy_dtype
"""Not that of ml_dtypes."""


def main() -> None:
    tf1.logging.set_verbosity(tf1.logging.ERROR)
    entries = []
    recorded: dict[str, list[NDArray[Any]]] = {"uint16": [], "float32": [], "float64": []}
    expected: list[NDArray[np.float32]] = []
    for call in CALLS:
        own = record(call)
        entries.append(
            {
                "name": call.name,
                "implementation": own.implementation,
                "inputs_crc32": inputs_crc32(call),
                "outputs": {name: [name_of(array), array.shape] for name, array in own.outputs.items()},
            }
        )
        for array in own.outputs.values():
            bits = array.view(np.uint16) if array.dtype.itemsize == 2 else array
            recorded[bits.dtype.name].append(bits.ravel())
        if call.dtype != "float64":
            wide = record_in_float64(call, own)
            expected += [wide[name].ravel().astype(np.float32) for name in own.outputs]
    path = Path(__file__).with_name("batch_norm_layer.npz")
    numbers: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in recorded.items()}
    manifest = json.dumps({**VERSIONS, "numpy": np.__version__, "cases": entries})
    np.savez_compressed(path, manifest=manifest, expected=np.concatenate(expected), **numbers)


@dataclass(frozen=True)
class Record:
    """What one case gave.

    Attributes:
        implementation: A key of IMPLEMENTATIONS.
        outputs: By name: "first/y", "first/gradients/gamma", "variables/2/moving_mean/biased", "losses/beta", ...
    """

    implementation: str
    outputs: Arrays


def record(call: LayerCall) -> Record:
    """Returns what a case gives as it is."""
    arguments, inputs = layer_arguments(call), layer_inputs(call)
    implementation = implementation_of(call)
    if call.dtype != "bfloat16" or "fused" not in implementation.split():
        return Record(implementation, dict(outputs_of(call, arguments, inputs)))
    single = [replace(step, x=step.x.astype(np.float32), dy=step.dy.astype(np.float32)) for step in inputs]
    outputs = dict(outputs_of(call, arguments, tuple(single)))
    images = {name: array.astype(DTYPES["bfloat16"]) for name, array in outputs.items() if is_image(name)}
    return Record(implementation, outputs | images)


def record_in_float64(call: LayerCall, own: Record) -> Arrays:
    """Returns the outputs of a case in float64; losses are those of its own dtype."""
    arguments = layer_arguments(call)
    # tf.sqrt makes float32 of a Python number, which renorm then combines with float64.
    arguments |= {"fused": False, "epsilon": np.float64(arguments.get("epsilon", 0.001))}
    if own.implementation == "slim fused":
        # The core layer, which replaces it, does not update what is not trainable.
        arguments["trainable"] = True
    steps = tuple(
        LayerInputs(
            step.x.astype(np.float64),
            step.dy.astype(np.float64),
            None if step.batch_weights is None else step.batch_weights.astype(np.float64),
            None if step.adjustment is None else (step.adjustment[0].astype(float), step.adjustment[1].astype(float)),
        )
        for step in layer_inputs(call)
    )
    correction = 1.0
    if call.is_training and "fused" in own.implementation.split():
        elements = math.prod(call.shape) // call.shape[call.axis]
        correction = elements / max(elements - 1, 1)
    losses = {name: array for name, array in own.outputs.items() if name.startswith("losses/")}
    return dict(outputs_of(call, arguments, steps, correction)) | losses


def outputs_of(
    call: LayerCall, arguments: Mapping[str, Any], steps: tuple[LayerInputs, ...], correction: float = 1.0
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the outputs of a case by name; moving_variance averages `correction` times what TensorFlow gives it."""
    with tf1.Graph().as_default(), tf1.Session() as session:
        graph = build(call, arguments, steps[0])
        initialise = tf1.global_variables_initializer()

        def passed(prefix: str, mode: "Mode", step: LayerInputs) -> Iterator[tuple[str, NDArray[Any]]]:
            outputs = session.run({"y": mode.y} | mode.gradients, graph.feed(step))
            yield from ((f"{prefix}/{name}", as_recorded(output)) for name, output in outputs.items())

        session.run(initialise)
        yield from passed("first", graph.first, steps[0])
        yield from ((f"losses/{name}", loss) for name, loss in session.run(graph.losses).items())
        # What updates in place did so when the first call ran.
        session.run(initialise)
        start = session.run(graph.variables)["moving_variance"]
        for updates in range(call.updates + 1):
            if updates:
                if updates == call.updates and "renorm_mean" in graph.variables:
                    yield from passed("last", graph.first, steps[-1])
                session.run(graph.updates, graph.feed(steps[updates - 1]))
            if updates in RECORDED_UPDATES:
                variables = session.run(graph.variables)
                if correction != 1 and graph.updates:
                    kept = start * arguments["decay"] ** updates
                    variables["moving_variance"] = kept + correction * (variables["moving_variance"] - kept)
                yield from ((f"variables/{updates}/{name}", as_recorded(v)) for name, v in variables.items())
        if call.is_training:
            if correction != 1:
                session.run(graph.variables["moving_variance"].assign(variables["moving_variance"]))
            yield from passed("inference", graph.inference, steps[0])


@dataclass(frozen=True)
class Mode:
    """The layer in training or in inference: tensors of y and, by name, of the gradients of sum(y * dy)."""

    y: Any
    gradients: dict[str, Any]


@dataclass(frozen=True)
class LayerGraph:
    """A layer in TensorFlow.

    Attributes:
        fed: Placeholders, in the order of `LayerInputs.arrays`.
        first: In the mode of the case.
        inference: In inference, after training.
        updates: What to run for one update.
        variables: By their name in the scope.
        losses: Of regularizers, by variable.
    """

    fed: list[Any]
    first: Mode
    inference: Mode
    updates: list[Any]
    variables: dict[str, Any]
    losses: dict[str, Any]

    def feed(self, step: LayerInputs) -> dict[Any, NDArray[Any]]:
        return dict(zip(self.fed, map(as_fed, step.arrays), strict=True))


def build(call: LayerCall, arguments: Mapping[str, Any], step: LayerInputs) -> LayerGraph:
    fed = [tf1.placeholder(as_fed(array).dtype, array.shape) for array in step.arrays]
    x, dy, *others = fed
    sources = {"x": x}
    of_the_call: dict[str, Any] = {}
    if step.batch_weights is not None:
        of_the_call["batch_weights"] = sources["batch_weights"] = others.pop(0)
    if step.adjustment is not None:
        scale, bias = others
        sources |= {"adjustment_scale": scale, "adjustment_bias": bias}
        of_the_call["adjustment"] = lambda _: (scale, bias)

    def mode(*, is_training: bool, reuse: bool | None) -> Mode:
        y = batch_norm(x, arguments, scope=SCOPE, is_training=is_training, reuse=reuse, **of_the_call)
        differentiable = {name: s for name, s in {**sources, **params()}.items() if s.dtype.is_floating}
        gradients = tf.gradients(y, list(differentiable.values()), grad_ys=dy)
        by_name = zip(differentiable, gradients, strict=True)
        return Mode(y, {f"gradients/{name}": gradient for name, gradient in by_name if gradient is not None})

    def params() -> dict[str, Any]:
        return {name: variable for name, variable in variables().items() if name in ("beta", "gamma")}

    first = mode(is_training=call.is_training, reuse=None)
    in_scope = {name.split("/")[1]: loss for name, loss in named(tf1.losses.get_regularization_losses())}
    collection = arguments.get("updates_collections", "update_ops")
    updates = [first.y] if collection is None else tf1.get_collection(collection)
    return LayerGraph(fed, first, mode(is_training=False, reuse=True), updates, variables(), in_scope)


def named(tensors: list[Any]) -> list[tuple[str, Any]]:
    return [(tensor.op.name, tensor) for tensor in tensors]


def variables() -> dict[str, Any]:
    """Returns all variables by name, without the scope; it comes twice where the moving mean is debiased."""
    return {name.replace(f"{SCOPE}/", ""): variable for name, variable in named(tf1.global_variables())}


def implementation_of(call: LayerCall) -> str:
    """Returns which implementation runs, as the ops of the graph, and the modules that made them, tell."""
    with tf1.Graph().as_default() as graph:
        step = layer_inputs(call)[0]
        build_as = "float32" if call.dtype == "bfloat16" else call.dtype
        step = replace(step, x=step.x.astype(build_as), dy=step.dy.astype(build_as))
        build(call, layer_arguments(call), step)
        ops = graph.get_operations()
    fused = any(op.type.startswith("FusedBatchNorm") for op in ops)
    # Only the core layer is made by code of Keras.
    core = any("keras" in frame.filename for op in ops for frame in op.traceback)
    if fused:
        return "core fused" if core else "slim fused"
    return "core unfused" if core else "legacy"


def is_image(name: str) -> bool:
    return name.endswith(("/y", "/gradients/x"))


def as_fed(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != DTYPES["bfloat16"]:
        return array
    return array.astype(np.float32).astype(BFLOAT16)


def as_recorded(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)
    return array.astype(np.float32).astype(DTYPES["bfloat16"]) if array.dtype == BFLOAT16 else array


def name_of(array: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


if __name__ == "__main__":
    main()
