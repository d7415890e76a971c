"""The recorded cases of CudnnRNN and CudnnRNNBackprop, and how close outputs must be to them.

    @pytest.mark.parametrize("case", load_cases(), ids=str)
    def test_cudnn_rnn(case):
        forward = ...(case.inputs, case.problem)
        assert_outputs(case, forward)
        backprop = ...(case.backprop_inputs(forward), case.problem)
        assert_outputs(case, backprop)

Inputs are the same numbers in every dtype, so all dtypes are compared with what PyTorch computed in float64. Inputs and
expectations are NumPy arrays, made once for all tests: do not write to them.
"""

import functools
import itertools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.declaration import plan_forward
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Problem,
)
from tests.golden.seeded_inputs import DTYPES, cudnn_rnn_inputs
from tests.ops.cudnn_rnn.reference import OutputGradients

Arrays: TypeAlias = dict[str, NDArray[Any]]

RELATIVE_ERRORS = {"float64": 1e-10, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By dtype: of every output, relative to its largest magnitude. For 16 bits this is one to two units in the last place
of that."""

OPAQUE = ("reserve_space", "host_reserved")
"""Outputs that each device fills as it likes."""


@dataclass(frozen=True)
class Case:
    """A call of CudnnRNN in training, and one of CudnnRNNBackprop.

    Attributes:
        name: Says dtype, order of dimensions, network and whether there are sequence lengths.
        dtype: Of all floats.
        inputs: Of CudnnRNN.
        attributes: Of CudnnRNN.
        gradients: Of its outputs.
        expected: What PyTorch computed in float64: all outputs of both ops but the opaque ones, by name.
        recorded: What PyTorch computed in this dtype; as `expected`, for 16 bits nothing.
        inputs_crc32: Of the inputs that PyTorch got, and of those made here.
    """

    name: str
    dtype: str
    inputs: ForwardInputs
    attributes: ForwardAttributes
    gradients: OutputGradients
    expected: Mapping[str, NDArray[Any]]
    recorded: Mapping[str, NDArray[Any]]
    inputs_crc32: tuple[int, int]

    def __str__(self) -> str:
        return self.name

    @property
    def problem(self) -> Problem:
        return plan_forward(self.inputs, self.attributes).problem

    def backprop_inputs(self, forward: ForwardOutputs) -> BackpropInputs:
        """Returns the inputs of CudnnRNNBackprop, with what CudnnRNN gave."""
        return BackpropInputs(**vars(self.inputs), **vars(self.gradients), **vars(forward))


def assert_outputs(case: Case, outputs: ForwardOutputs | BackpropOutputs | Mapping[str, Any]) -> None:
    """Checks dtype, shape and numbers of the outputs of one op, in host memory; of all but the opaque ones."""
    by_name = outputs if isinstance(outputs, Mapping) else vars(outputs)
    checked = [name for name in by_name if name not in OPAQUE]
    assert checked == list(case.expected)[:3] or checked == list(case.expected)[3:]
    for name in checked:
        assert_output(case, name, by_name[name])


def assert_output(case: Case, name: str, output: NDArray[Any]) -> None:
    """Checks dtype, shape and numbers of one output, in host memory."""
    expected = case.expected[name]
    assert (output.dtype, output.shape) == (DTYPES[case.dtype], expected.shape), name
    part = relative_error(case, name, output) / RELATIVE_ERRORS[case.dtype]
    assert part <= 1, f"{name} is off by {part:.3g} times what is allowed"


def relative_error(case: Case, name: str, output: NDArray[Any]) -> float:
    """Returns the largest error of an output, relative to the largest magnitude of what is expected."""
    expected = case.expected[name]
    error = float(np.max(np.abs(output.astype(np.float64) - expected)))
    return error / (float(np.max(np.abs(expected))) or 1.0)


@functools.cache
def load_cases() -> tuple[Case, ...]:
    """Returns all cases: float32 and float64 with time and with the batch first, 16 bits with time first."""
    with np.load(_PATH) as file:
        entries = json.loads(str(file["manifest"]))["cases"]
        numbers = {dtype: file[dtype] for dtype in ("float32", "float64")}
    cases: list[Case] = []
    position = 0
    for entry in entries:
        recorded: dict[str, Arrays] = {dtype: {} for dtype in numbers}
        for name, shape in entry["outputs"].items():
            start, position = position, position + math.prod(shape)
            for dtype, stored in numbers.items():
                recorded[dtype][name] = stored[start:position].reshape(shape)
        for dtype, time_major in itertools.product(DTYPES, (True, False)):
            if time_major or DTYPES[dtype].itemsize > 2:
                cases.append(_case(entry, recorded, dtype, time_major))
    return tuple(cases)


_PATH = Path(__file__).with_name("cudnn_rnn.npz")

_OUTPUTS = (
    *("output", "output_h", "output_c"),
    *("input_backprop", "input_h_backprop", "input_c_backprop", "params_backprop"),
)


def _case(entry: Mapping[str, Any], recorded: Mapping[str, Arrays], dtype: str, time_major: bool) -> Case:
    drawn = cudnn_rnn_inputs(entry["seed"], {name: tuple(shape) for name, shape in entry["shapes"].items()})
    crc32 = zlib.crc32(b"".join(array.tobytes() for array in drawn.values()))
    arrays = {name: _ordered(array, time_major).astype(DTYPES[dtype]) for name, array in drawn.items()}
    gradients = {name: arrays.pop(name) for name in list(arrays) if name.endswith("_backprop")}
    lengths = entry["lengths"] and np.array(entry["lengths"], np.int32)
    return Case(
        name="-".join([dtype, "time_major" if time_major else "batch_major", entry["name"]]),
        dtype=dtype,
        inputs=ForwardInputs(**arrays, sequence_lengths=lengths),
        attributes=ForwardAttributes(
            rnn_mode=entry["rnn_mode"],
            input_mode="skip_input" if entry["skip_input"] else "linear_input",
            direction="bidirectional" if entry["num_directions"] == 2 else "unidirectional",
            num_proj=entry["num_proj"],
            time_major=time_major,
        ),
        gradients=OutputGradients(**gradients),
        expected=_all_outputs(recorded["float64"], time_major),
        recorded=_all_outputs(recorded[dtype], time_major) if dtype in recorded else {},
        inputs_crc32=(entry["inputs_crc32"], crc32),
    )


def _all_outputs(recorded: Arrays, time_major: bool) -> Arrays:
    """In the order of the ops; scalars where there are no cells."""
    nothing = np.zeros((), recorded["output"].dtype)
    return {name: _ordered(recorded.get(name, nothing), time_major) for name in _OUTPUTS}


def _ordered(array: NDArray[Any], time_major: bool) -> NDArray[Any]:
    return np.ascontiguousarray(array.swapaxes(0, 1)) if array.ndim == 3 and not time_major else array
