"""The recorded cases of LayerNorm and LayerNormGrad, and how close outputs must be to them.

    @pytest.mark.parametrize("case", load_cases(), ids=str)
    def test_layer_norm(case):
        assert_outputs(case, ...(case.inputs, case.attributes, case.geometry))
        assert_outputs(case, ...(case.grad_inputs, case.geometry))

Inputs are the same numbers in every dtype, so `LayerNorm` is compared with what PyTorch computed in float64 for every
dtype. Inputs and expectations are NumPy arrays, made once for all tests: do not write to them.
"""

import functools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.layer_norm import reference
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
    plan_forward,
)
from tests.golden.fused_batch_norm import half_ulp
from tests.golden.seeded_inputs import DTYPES, layer_norm_inputs, param_dtype

Arrays: TypeAlias = dict[str, NDArray[Any]]

FORWARD = tuple(ForwardOutputs.__dataclass_fields__)
GRADIENT = tuple(GradOutputs.__dataclass_fields__)
RELATIVE_ERRORS = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
"""By T: relative to the largest magnitude of an output. y and x_backprop of 16 bits may be rounded, too."""

PYTORCH_ERRORS = {"float64": 1e-10, "float32": 1e-4, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""The same for what PyTorch computed: it adds up gradients of scale and offset in T, and loses digits to an offset."""


@dataclass(frozen=True)
class Case:
    """A call of LayerNorm, and one of LayerNormGrad with what it gave.

    Attributes:
        name: Says dtype and sizes.
        dtype: T.
        inputs: Of LayerNorm.
        attributes: Of LayerNorm.
        grad_inputs: Of LayerNormGrad, with the expected mean and rstd, rounded to U.
        expected: All outputs of both ops in float64: what PyTorch computed in float64; where T is not float64, the
            gradients are those that the reference computes in float64 of the rounded mean and rstd.
        recorded: What PyTorch computed in this dtype: all outputs of both ops.
        inputs_crc32: Of the inputs that PyTorch got, and of those made here.
    """

    name: str
    dtype: str
    inputs: ForwardInputs
    attributes: ForwardAttributes
    grad_inputs: GradInputs
    expected: Mapping[str, NDArray[np.float64]]
    recorded: Mapping[str, NDArray[Any]]
    inputs_crc32: tuple[int, int]

    def __str__(self) -> str:
        return self.name

    @property
    def geometry(self) -> Geometry:
        return plan_forward(self.inputs, self.attributes).geometry


def assert_outputs(case: Case, outputs: ForwardOutputs | GradOutputs | Mapping[str, Any]) -> None:
    """Checks dtype, shape and numbers of the outputs of one op, in host memory."""
    by_name = outputs if isinstance(outputs, Mapping) else vars(outputs)
    assert tuple(by_name) in (FORWARD, GRADIENT)
    for name, output in by_name.items():
        assert_output(case, name, output)


def assert_output(case: Case, name: str, output: NDArray[Any], tolerance: float | None = None) -> None:
    """Checks dtype, shape and numbers of one output, in host memory."""
    expected = case.expected[name]
    is_large = name in ("y", "x_backprop")
    dtype = DTYPES[case.dtype] if is_large else param_dtype(case.dtype)
    assert (output.dtype, output.shape) == (dtype, expected.shape), name
    relative = RELATIVE_ERRORS[case.dtype] if tolerance is None else tolerance
    allowed = np.full(expected.shape, relative * _magnitude(case, name))
    if dtype.itemsize == 2:
        allowed += half_ulp(expected, dtype)
    wide = output.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(expected), name)
    errors = np.abs(wide - expected)
    is_off = errors > allowed
    assert not is_off.any(), f"{name} is off by up to {np.nanmax(errors):.3g}, allowed are {np.max(allowed):.3g}"


@functools.cache
def load_cases() -> tuple[Case, ...]:
    """Returns all cases, in every dtype that has their numbers."""
    with np.load(_PATH) as file:
        entries = json.loads(str(file["manifest"]))["cases"]
        numbers = {kind: file[kind] for kind in ("uint16", "float32", "float64")}
    used = dict.fromkeys(numbers, 0)
    cases = []
    for entry in entries:
        recorded: dict[str, Arrays] = {dtype: {} for dtype in entry["dtypes"]}
        for dtype in entry["dtypes"]:
            for name, shape in _output_shapes(entry).items():
                own = DTYPES[dtype] if name in ("y", "x_backprop") else param_dtype(dtype)
                kind = "uint16" if own.itemsize == 2 else own.name
                start, used[kind] = used[kind], used[kind] + math.prod(shape)
                recorded[dtype][name] = numbers[kind][start : used[kind]].view(own).reshape(shape)
        cases += [_case(entry, recorded, dtype) for dtype in entry["dtypes"]]
    assert all(used[kind] == array.size for kind, array in numbers.items())
    return tuple(cases)


_PATH = Path(__file__).with_name("layer_norm.npz")


def _output_shapes(entry: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    x, scale = tuple(entry["shape"]), tuple(entry["scale_shape"])
    stats = x[: len(x) - len(scale)]
    return dict(zip((*FORWARD, *GRADIENT), (x, stats, stats, x, scale, scale), strict=True))


def _case(entry: Mapping[str, Any], recorded: Mapping[str, Arrays], dtype: str) -> Case:
    drawn = layer_norm_inputs(entry["seed"], tuple(entry["shape"]), tuple(entry["scale_shape"]), entry["centre"])
    crc32 = zlib.crc32(b"".join(array.tobytes() for array in drawn.values()))
    x, y_backprop = (drawn[name].astype(DTYPES[dtype]) for name in ("x", "y_backprop"))
    scale, offset = (drawn[name].astype(param_dtype(dtype)) for name in ("scale", "offset"))
    expected: Arrays = dict(recorded["float64"])
    stats = {name: expected[name].astype(param_dtype(dtype)) for name in ("mean", "rstd")}
    inputs, grad_inputs = ForwardInputs(x, scale, offset), GradInputs(y_backprop, x, scale, **stats)
    attributes = ForwardAttributes(entry["epsilon"])
    if dtype != "float64":
        wide = GradInputs(**{name: array.astype(np.float64) for name, array in vars(grad_inputs).items()})
        expected |= vars(reference.layer_norm_grad(np, wide, plan_forward(inputs, attributes).geometry))
    return Case(
        name=f"{dtype}-{entry['name']}",
        dtype=dtype,
        inputs=inputs,
        attributes=attributes,
        grad_inputs=grad_inputs,
        expected=expected,
        recorded=recorded[dtype],
        inputs_crc32=(entry["inputs_crc32"], crc32),
    )


def _magnitude(case: Case, name: str) -> float:
    """Returns the largest magnitude of an output, or of the terms that it is the difference of; that of inputs is 1."""
    expected = case.expected[name]
    magnitude = float(np.max(np.abs(expected), initial=1, where=~np.isnan(expected)))
    if name != "x_backprop":
        return magnitude
    inputs, shape = case.grad_inputs, case.geometry.shape
    g = inputs.y_backprop.astype(np.float64).reshape(shape) * inputs.scale.reshape(-1)
    return max(magnitude, float(np.max(np.abs(g * inputs.rstd.reshape(-1, 1)), initial=0)))
