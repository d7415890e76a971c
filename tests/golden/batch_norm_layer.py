"""The recorded cases of the batch_norm layer, and how close outputs must be to them.

    @pytest.mark.parametrize("case", load_layer_cases(), ids=str)
    def test_first_call(case):
        first = case.steps[0]
        layer = ...(**case.arguments)
        y = layer(first.x, case.is_training, first.batch_weights, first.adjustment)
        assert_call(case.first, y, ...)  # the gradients of sum(y * first.dy), by name

In training `case.variables` are those before all updates, and those after 1, 2 and 10 of them: update k gets the
inputs `case.steps[k - 1]`. `case.inference` is a call in inference after the last, with the inputs `case.steps[0]`.
With renorm training depends on variables: there `case.last` is a call in training, with the inputs `case.steps[-1]`,
before the last update.

Arguments are those of `client.batch_norm`, with two that need a translation: an element of `param_initializers` is
an array, in float64 for float64 and in float32 for others, and one of `param_regularizers` is plain data:
{"regularizer": ["l1_l2", {"l1": 0.2, "l2": 0.05}]}, of a kind "l1", "l2" or "l1_l2". Inputs and expectations are
NumPy arrays, made once for all tests: do not write to them.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.golden.batch_norm_layer_calls import CALLS
from tests.golden.fused_batch_norm import half_ulp
from tests.golden.seeded_inputs import DTYPES
from tests.golden.seeded_layer_inputs import LayerCall, LayerInputs, inputs_crc32, layer_arguments, layer_inputs

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

RELATIVE_ERRORS = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
"""By the dtype of x: relative to the largest magnitude of an output. 16-bit outputs may be rounded, too."""

ROUNDINGS = 8
"""How many roundings to 16 bits, of the largest magnitude of an output, may add up where arithmetic is 16-bit."""


@dataclass(frozen=True)
class Output:
    """One array that TensorFlow computed.

    Attributes:
        name: Of the array: "y", "gradients/gamma", "moving_mean/biased", ...
        recorded: What the layer gave as it is. It has the right dtype and shape.
        expected: What it gives in float64, for the same numbers and with the same meaning.
        allowed: The largest error at each element.
    """

    name: str
    recorded: NDArray[Any]
    expected: NDArray[np.float64]
    allowed: NDArray[np.float64]


@dataclass(frozen=True)
class Call:
    """What one call of a layer gives.

    Attributes:
        y: The layer's output, activation included.
        gradients: Those of sum(y * dy), with respect to "x", "beta", "gamma", "batch_weights", "adjustment_scale" and
            "adjustment_bias": those that there are. Losses of regularizers are not part of it.
    """

    y: Output
    gradients: Mapping[str, Output]


@dataclass(frozen=True)
class LayerCase:
    """A layer and calls of it.

    Attributes:
        name: Says dtype, shape, layout, mode and what is special.
        dtype: Of x.
        implementation: "slim fused", "core fused", "core unfused" or "legacy".
        arguments: Of the layer; see above.
        is_training: Of the first call.
        steps: The inputs of all calls: ten in training, one in inference.
        first: The first call, with variables as they were initialised.
        variables: All of them by name, after 0 updates and, in training, after 1, 2 and 10.
        regularization_losses: By variable; empty where the implementation ignores regularizers.
        last: A call in training with the last inputs, after nine updates; only with renorm.
        inference: A call in inference with the first inputs, after all updates; None if the first is that.
        inputs_crc32: Of the inputs that TensorFlow got, and of those made here.
    """

    name: str
    dtype: str
    implementation: str
    arguments: Mapping[str, Any]
    is_training: bool
    steps: tuple[LayerInputs, ...]
    first: Call
    variables: Mapping[int, Mapping[str, Output]]
    regularization_losses: Mapping[str, Output]
    last: Call | None
    inference: Call | None
    inputs_crc32: tuple[int, int]

    def __str__(self) -> str:
        return self.name

    @property
    def outputs(self) -> Iterator[Output]:
        """All that was recorded."""
        for call in (self.first, self.last, self.inference):
            if call is not None:
                yield call.y
                yield from call.gradients.values()
        for variables in self.variables.values():
            yield from variables.values()
        yield from self.regularization_losses.values()


def assert_call(expected: Call, y: NDArray[Any], gradients: Mapping[str, NDArray[Any] | None]) -> None:
    """Checks dtype, shape and numbers of a call's output and of all its gradients; None is no gradient."""
    assert_output(expected.y, y)
    assert_arrays(expected.gradients, {name: array for name, array in gradients.items() if array is not None})


def assert_arrays(expected: Mapping[str, Output], arrays: Arrays) -> None:
    """Checks that there are all arrays of these names and no others, and their dtypes, shapes and numbers."""
    assert set(arrays) == set(expected)
    for name, output in expected.items():
        assert_output(output, arrays[name])


def assert_output(expected: Output, array: NDArray[Any]) -> None:
    """Checks dtype, shape and numbers of one array, in host memory."""
    wanted = (expected.recorded.dtype, expected.recorded.shape)
    assert (array.dtype, array.shape) == wanted, expected.name
    errors = np.abs(array.astype(np.float64) - expected.expected)
    assert np.all(errors <= expected.allowed), (
        f"{expected.name} is off by up to {np.max(errors):.3g}, allowed are {np.max(expected.allowed):.3g}"
    )


@functools.cache
def load_layer_cases() -> tuple[LayerCase, ...]:
    """Returns all cases, in the order in which they were recorded."""
    return tuple(_case(call, entry, outputs) for call, (entry, outputs) in zip(CALLS, _entries(), strict=True))


def load_versions() -> dict[str, str]:
    """Returns those of the libraries that computed what is recorded."""
    with np.load(_PATH) as file:
        manifest = json.loads(str(file["manifest"]))
    return {name: manifest[name] for name in ("tensorflow", "tf_slim", "numpy")}


_PATH = Path(__file__).with_name("batch_norm_layer.npz")

_Pairs: TypeAlias = dict[str, tuple[NDArray[Any], NDArray[np.float64]]]
"""By name: what was recorded, and what is expected."""


def _entries() -> Iterator[tuple[dict[str, Any], _Pairs]]:
    """Yields what the file says of each case, and its arrays."""
    with np.load(_PATH) as file:
        manifest = json.loads(str(file["manifest"]))
        numbers = {dtype: file[dtype] for dtype in ("uint16", "float32", "float64", "expected")}
    used = dict.fromkeys(numbers, 0)

    def take(stored: str, shape: tuple[int, ...]) -> NDArray[Any]:
        start = used[stored]
        used[stored] += math.prod(shape)
        part: NDArray[Any] = numbers[stored][start : used[stored]]
        return part

    for call, entry in zip(CALLS, manifest["cases"], strict=True):
        pairs: _Pairs = {}
        for name, (dtype, shape) in entry["outputs"].items():
            stored = "uint16" if DTYPES[dtype].itemsize == 2 else dtype
            recorded = take(stored, shape).view(DTYPES[dtype]).reshape(shape)
            expected = recorded if call.dtype == "float64" else take("expected", shape).reshape(shape)
            pairs[name] = recorded, expected.astype(np.float64)
        yield entry, pairs


def _case(call: LayerCall, entry: Mapping[str, Any], pairs: _Pairs) -> LayerCase:
    assert call.name == entry["name"]
    steps = layer_inputs(call)
    comparison = _Comparison(call, entry["implementation"])

    def outputs(prefix: str, step: LayerInputs | None = None) -> dict[str, Output]:
        names = [name for name in pairs if name.startswith(prefix)]
        return {
            name.removeprefix(prefix): comparison.output(name.removeprefix(prefix), *pairs[name], step)
            for name in names
        }

    def recorded_call(prefix: str, step: LayerInputs) -> Call | None:
        made = outputs(prefix, step)
        gradients = {n.removeprefix("gradients/"): made[n] for n in made if n.startswith("gradients/")}
        return Call(made["y"], gradients) if made else None

    first = recorded_call("first/", steps[0])
    assert first is not None
    counts = sorted({int(name.split("/")[1]) for name in pairs if name.startswith("variables/")})
    return LayerCase(
        name=call.name,
        dtype=call.dtype,
        implementation=entry["implementation"],
        arguments=layer_arguments(call),
        is_training=call.is_training,
        steps=steps,
        first=first,
        variables={count: outputs(f"variables/{count}/") for count in counts},
        regularization_losses=outputs("losses/"),
        last=recorded_call("last/", steps[-1]),
        inference=recorded_call("inference/", steps[0]),
        inputs_crc32=(entry["inputs_crc32"], inputs_crc32(call)),
    )


@dataclass(frozen=True)
class _Comparison:
    """How close outputs of a case must be."""

    call: LayerCall
    implementation: str

    def output(
        self, name: str, recorded: NDArray[Any], expected: NDArray[np.float64], step: LayerInputs | None
    ) -> Output:
        magnitude = np.max(np.abs(expected), initial=0)
        if name == "gradients/x" and step is not None:
            magnitude = max(magnitude, self._first_term(step))
        allowed = np.full(expected.shape, self._relative_error(name) * magnitude)
        if recorded.dtype.itemsize == 2:
            allowed += half_ulp(expected, recorded.dtype)
        return Output(name, recorded, expected, allowed)

    def _relative_error(self, name: str) -> float:
        relative = RELATIVE_ERRORS[self.call.dtype] + self._error_of_decay()
        dtype = DTYPES[self.call.dtype]
        activated = self.call.arguments.get("activation_fn") is not None
        if dtype.itemsize == 2 and (self.implementation == "legacy" or activated):
            relative += ROUNDINGS * float(half_ulp(np.ones(1), dtype)[0])
        return relative

    def _error_of_decay(self) -> float:
        """Returns the relative error of 1 - decay where the layer makes decay float32 first: it is rounded near 1."""
        rate = 1 - self.call.arguments["decay"]
        computed = self.implementation == "core fused" or "zero_debias_moving_mean" in self.call.arguments
        return 2.0**-24 / rate if computed and rate and self.call.dtype != "float64" else 0.0

    def _first_term(self, step: LayerInputs) -> float:
        """Returns the largest dy / s: in training the gradient of x is a difference of this and of others.

        It is of almost nothing where channels have one or two elements, and its error is that of its terms.
        """
        weights = np.ones(self.call.shape)
        if step.batch_weights is not None:
            weights *= step.batch_weights.astype(np.float64).reshape(-1, *[1] * (len(self.call.shape) - 1))
        axes = tuple(axis for axis in range(len(self.call.shape)) if axis != self.call.axis)
        x, total = step.x.astype(np.float64), np.maximum(np.sum(weights, axes, keepdims=True), 1e-30)
        mean = np.sum(weights * x, axes, keepdims=True) / total
        variance = np.sum(weights * (x - mean) ** 2, axes, keepdims=True) / total
        deviation = np.sqrt(variance + self.call.arguments.get("epsilon", 0.001))
        return float(np.max(np.abs(step.dy.astype(np.float64)) / np.maximum(deviation, 1e-6)))
