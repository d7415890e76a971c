"""How exact the gradients of parameters of CudnnRNN are on the host, as docs/rnn_accuracy.md says."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import threadpoolctl
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import ForwardAttributes, ForwardInputs, PseudoLayerParams, split_params
from tests.ops.cudnn_rnn.random_calls import Call, Numbers, numbers
from tests.ops.cudnn_rnn.reference import OutputGradients

Values = TypeVar("Values", ForwardInputs, OutputGradients)

ERROR = 5e-7
"""Of the gradient of a matrix or bias, relative to its largest magnitude."""
WORST_ERROR = 1e-5
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")


@pytest.fixture(scope="module")
def parallel() -> Iterator[ForkJoin]:
    made = ForkJoin(2)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # as in a server
        yield made
    made.close()


@pytest.fixture(scope="module", params=["kernels", "numpy"])
def rnn(request: pytest.FixtureRequest, parallel: ForkJoin) -> CpuCudnnRnn:
    made = CpuCudnnRnn(CpuDevice(BufferPool(1 << 28)), parallel, ReserveKey(Numbers()))
    if request.param == "kernels":
        made.prepare(lambda: False)
    return made


def make_call(mode: str, weights: float = 0.01, **options: Any) -> Call:
    """Inputs from 0 to 1, small weights, and a gradient of 1 for each output, as upstream's tests have them."""
    attributes = ForwardAttributes(rnn_mode=mode, num_proj=options.pop("num_proj", 0))
    call = Call(attributes, layers=1, dtype=np.float32, **options)
    given = vars(call.inputs)
    changed = {name: np.abs(given[name]) for name in ("input", "input_h", "input_c") if given[name] is not None}
    changed["params"] = given["params"] * np.float32(2 * weights)
    call.inputs = replace(call.inputs, **changed)
    call.gradients = replace(
        call.gradients,
        output_backprop=np.ones_like(call.gradients.output_backprop),
        output_h_backprop=np.zeros_like(call.gradients.output_h_backprop),
        output_c_backprop=None if "input_c" not in changed else np.zeros_like(changed["input_c"]),
    )
    return call


def gradients(rnn: CpuCudnnRnn, call: Call) -> dict[str, NDArray[Any]]:
    _, backprop = call.run(rnn)
    (params,) = split_params(call.problem.network, backprop.params_backprop)
    named = {field.name: getattr(params, field.name) for field in fields(PseudoLayerParams)}
    return {name: array for name, array in named.items() if array is not None}


def widened(call: Call) -> Call:
    """Returns the same call in float64."""
    wide = Call.__new__(Call)
    wide.attributes = call.attributes
    wide.inputs, wide.gradients = _all_widened(call.inputs), _all_widened(call.gradients)
    wide.problem = replace(call.problem, dtype=np.dtype(np.float64))
    return wide


def exact(rnn: CpuCudnnRnn, call: Call) -> dict[str, NDArray[Any]]:
    return gradients(rnn, widened(call))


def _all_widened(values: Values) -> Values:
    arrays: dict[str, Any] = {name: _widened(array) for name, array in vars(values).items()}
    return replace(values, **arrays)


def _widened(array: NDArray[Any] | None) -> NDArray[Any] | None:
    return array if array is None or array.dtype != np.float32 else array.astype(np.float64)


def errors(rnn: CpuCudnnRnn, call: Call) -> dict[str, float]:
    """Returns the largest error of each parameter's gradient, relative to its largest magnitude."""
    expected = exact(rnn, call)
    return {
        name: float(np.abs(array - expected[name]).max() / np.abs(expected[name]).max())
        for name, array in gradients(rnn, call).items()
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lengths", [None, [32, *range(2, 32, 2)]], ids=["whole", "unequal"])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_half_of_what_upstream_allows(rnn: CpuCudnnRnn, mode: str, lengths: list[int] | None, seed: int) -> None:
    """Upstream's largest tests: most of what they allow is used up by the float32 that they compare with."""
    call = make_call(mode, steps=32, batch=16, input_size=128, units=128, lengths=lengths, seed=seed)
    expected = exact(rnn, call)
    for name, array in gradients(rnn, call).items():
        np.testing.assert_allclose(array, expected[name], rtol=1.5e-6, atol=1.5e-6, err_msg=name)


@pytest.mark.parametrize(
    "sizes",
    [
        {"steps": 16, "batch": 8, "input_size": 64, "units": 128},
        {"steps": 45, "batch": 45, "input_size": 16, "units": 32},
        {"steps": 8, "batch": 300, "input_size": 16, "units": 32},
        {"steps": 600, "batch": 3, "input_size": 16, "units": 32},
        {"steps": 300, "batch": 32, "input_size": 16, "units": 32},
    ],
    ids=lambda sizes: f"{sizes['steps']}x{sizes['batch']}",
)
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_long_sums(rnn: CpuCudnnRnn, mode: str, sizes: dict[str, int]) -> None:
    found = errors(rnn, make_call(mode, weights=0.05, **sizes))
    assert max(found.values()) < ERROR, found


@pytest.mark.parametrize("mode", MODES)
def test_what_is_always_the_same(rnn: CpuCudnnRnn, mode: str) -> None:
    """Every addition is rounded to the same side, and errors of gates do not average out."""
    call = make_call(mode, steps=200, batch=100, input_size=8, units=8)
    call.inputs.input[...] = 0.1
    call.inputs.params[...] = 0.01
    found = errors(rnn, call)
    assert max(found.values()) < WORST_ERROR, found


def test_inputs_of_very_different_sizes(rnn: CpuCudnnRnn) -> None:
    """Each column of a matrix is as exact, beside its own magnitude."""
    call = make_call("lstm", steps=100, batch=50, input_size=16, units=16)
    call.inputs.input[...] *= np.geomspace(1e-6, 1e2, 16, dtype=np.float32)
    expected = exact(rnn, call)["input_weights"]
    error = np.abs(gradients(rnn, call)["input_weights"] - expected).max(axis=0) / np.abs(expected).max(axis=0)
    assert error.max() < 2 * ERROR, error


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_other_outputs(rnn: CpuCudnnRnn, mode: str) -> None:
    call = make_call(mode, weights=0.05, steps=100, batch=16, input_size=32, units=64)
    expected = numbers(*widened(call).run(rnn))
    for name, array in numbers(*call.run(rnn)).items():
        np.testing.assert_allclose(
            array, expected[name], rtol=0, atol=5e-6 * np.abs(expected[name]).max(), err_msg=name
        )


def test_projection(rnn: CpuCudnnRnn) -> None:
    found = errors(rnn, make_call("lstm", weights=0.1, steps=100, batch=50, input_size=16, units=32, num_proj=8))
    assert max(found.values()) < ERROR, found
