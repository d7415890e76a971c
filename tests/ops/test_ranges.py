"""Normalisation is right over the whole ranges of numbers that its documentation gives, on every device.

docs/fused_batch_norm_accuracy.md and docs/layer_norm.md have the ranges, under "Range". What is expected is computed in
float64, by the equations of the ops.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm import spec as batch_norm
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.layer_norm import spec as layer_norm
from gradserve_server.ops.layer_norm.cpu import CpuLayerNorm
from gradserve_server.ops.layer_norm.cuda import CudaLayerNorm
from gradserve_server.tensors.spec import BFLOAT16, FLOAT32
from tests.devices.cuda.emulation.device import H200, EmulatedDevice

TWO_PASSES = Limits(num_multiprocessors=3, shared_bytes=0)
"""A GPU on which no tile fits into shared memory."""
LARGEST = float(np.finfo(np.float32).max)

Family = Callable[[type], Any]
"""Makes a family, given its class for the CPU."""
CUDA: dict[type, type] = {CpuBatchNorm: CudaBatchNorm, CpuLayerNorm: CudaLayerNorm}


@pytest.fixture(scope="module", params=["kernels", "NumPy", "GPU", "GPU, two passes"])
def family(request: pytest.FixtureRequest, parallel: ForkJoin, _compiled_kernels: None, compiled: Path) -> Family:
    made: dict[type, Any] = {}

    def make(cpu: type) -> Any:
        if request.param.startswith("GPU"):
            return CUDA[cpu](EmulatedDevice(compiled, H200 if request.param == "GPU" else TWO_PASSES))
        if cpu not in made:
            made[cpu] = cpu(CpuDevice(BufferPool(1 << 26)), parallel)
            if request.param == "kernels":
                made[cpu].prepare(lambda: False)
        return made[cpu]

    return make


def is_gpu(family: Family) -> bool:
    return isinstance(family(CpuLayerNorm), CudaLayerNorm)


def noise(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(7).normal(0, 1, shape)


def near(found: Any, expected: Any, relative: float, what: str = "") -> None:
    """Compares beside the largest magnitude that is expected."""
    np.testing.assert_allclose(found.astype(np.float64), expected, 0, relative * np.abs(expected).max(), err_msg=what)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [7, 64, 1025, 4103])
@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-25, 1e-18, 1.0, 1e17, 1e18, 1e19, 1e25, 1e30, 1e36, 1e37])
def test_layer_norm(family: Family, size: int, magnitude: float) -> None:
    if magnitude > 1e36 and is_gpu(family):
        pytest.skip("beyond the range of a GPU")
    x = (noise(3, size) * magnitude).astype(np.float32)
    x[1] += np.float32(10 * magnitude)
    x[2, 0] *= 8  # what differences on a GPU begin with
    wide, ones = x.astype(np.float64), np.ones(size, np.float32)
    inputs = layer_norm.ForwardInputs(x, ones, 0 * ones)
    outputs = family(CpuLayerNorm).forward(inputs, layer_norm.ForwardAttributes(0.0), layer_norm.Geometry((3,), size))
    deviation = wide.std(axis=1)
    assert (np.abs(outputs.mean - wide.mean(axis=1)) <= 1e-5 * deviation + 2.0**-23 * np.abs(wide.mean(axis=1))).all()
    np.testing.assert_allclose(outputs.rstd, 1 / deviation, 1e-5)
    near(outputs.y, (wide - wide.mean(axis=1)[:, None]) / deviation[:, None], 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [7, 1025])
@pytest.mark.parametrize(
    ("magnitude", "of_dy"),
    [(1.0, 1e-30), (1.0, 1e34), (1e-25, 1e-10), (1e-25, 1e10), (1e19, 1e-15), (1e19, 1e34), (1e30, 1e-5), (1e36, 10.0)],
)
def test_layer_norm_gradient(family: Family, size: int, magnitude: float, of_dy: float) -> None:
    normal = noise(4, size)
    x = (normal * magnitude).astype(np.float32)
    dy = ((noise(5, size)[1:] + normal) * of_dy).astype(np.float32)
    wide, of_y, ones = x.astype(np.float64), dy.astype(np.float64), np.ones(size, np.float32)
    mean, rstd = wide.mean(axis=1).astype(np.float32), (1 / wide.std(axis=1)).astype(np.float32)
    inputs = layer_norm.GradInputs(dy, x, ones, mean, rstd)
    outputs = family(CpuLayerNorm).gradient(inputs, layer_norm.Geometry((4,), size))
    factor = rstd.astype(np.float64)[:, None]
    n = (wide - mean[:, None]) * factor
    expected = factor * (of_y - of_y.mean(axis=1)[:, None] - n * (of_y * n).mean(axis=1)[:, None])
    near(outputs.x_backprop, expected, 1e-5, "x_backprop")
    near(outputs.scale_backprop, (of_y * n).sum(axis=0), 1e-5, "scale_backprop")
    near(outputs.offset_backprop, of_y.sum(axis=0), 1e-5, "offset_backprop")


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("place", [0, 5, 1500, -1])
def test_an_infinity_in_layer_norm(family: Family, dtype: np.dtype[Any], place: int) -> None:
    x = np.ones((2, 3000), dtype)
    x[1, place] = np.inf
    ones = np.ones(3000, np.float32)
    inputs = layer_norm.ForwardInputs(x, ones, ones)
    outputs = family(CpuLayerNorm).forward(inputs, layer_norm.ForwardAttributes(1e-5), layer_norm.Geometry((2,), 3000))
    np.testing.assert_array_equal(outputs.mean, [1, np.inf])
    assert np.isnan(outputs.y[1].astype(np.float32)).all()
    assert (outputs.y[0] == 1).all()


by_format = pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])


def images(values: NDArray[Any], data_format: str) -> NDArray[Any]:
    """Returns [channels, count] as images of count pixels."""
    return np.ascontiguousarray(values[None, :, :, None] if data_format == "NCHW" else values.T[None, :, None, :])


def moments(family: Family, values: NDArray[Any], data_format: str, epsilon: float = 0.0) -> Any:
    channels = len(values)
    ones, nothing = np.ones(channels, np.float32), np.empty(0, np.float32)
    inputs = batch_norm.ForwardInputs(images(values, data_format), ones, 0 * ones, nothing, nothing)
    attributes = batch_norm.ForwardAttributes(epsilon, data_format=data_format)
    return family(CpuBatchNorm).forward(inputs, attributes, batch_norm.plan_forward(inputs, attributes).geometry)


@pytest.mark.sampled
@by_format
@pytest.mark.parametrize("count", [7, 4096, 33_333])
@pytest.mark.parametrize("deviation", [1e-18, 1e-16, 1.0, 1e18, 3e18, 1e19])
def test_batch_norm(family: Family, data_format: str, count: int, deviation: float) -> None:
    if deviation > 3e18 and is_gpu(family):
        pytest.skip("beyond the range of a GPU")
    values = (noise(3, count) * deviation).astype(np.float32)
    wide = values.astype(np.float64)
    outputs = moments(family, values, data_format)
    mean, variance = wide.mean(axis=1), wide.var(axis=1)
    near(outputs.reserve_space_1 / deviation, mean / deviation, 1e-5 / np.abs(mean / deviation).max(), "mean")
    np.testing.assert_allclose(outputs.reserve_space_2, variance, 1e-5)
    near(outputs.y, images((wide - mean[:, None]) / np.sqrt(variance)[:, None], data_format), 1e-5, "y")


@pytest.mark.sampled
@by_format
def test_the_mean_of_the_largest_numbers(family: Family, data_format: str) -> None:
    values = np.repeat(np.array([[LARGEST], [-3e38], [3e38]], np.float32), 1000, axis=1)
    values[2, ::2] = np.float32(2.999e38)
    outputs = moments(family, values, data_format)
    np.testing.assert_allclose(outputs.batch_mean / 1e38, values.mean(axis=1, dtype=np.float64) / 1e38, 1e-6)


@pytest.mark.sampled
@by_format
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("count", "place"), [(8, 3), (40_001, 0), (40_001, 5), (40_001, 30_000), (40_001, -1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_in_batch_norm(
    family: Family, data_format: str, dtype: np.dtype[Any], count: int, place: int, sign: int
) -> None:
    values = np.ones((3, count), dtype)
    values[1, place] = sign * np.inf
    outputs = moments(family, values, data_format, epsilon=1e-3)
    np.testing.assert_array_equal(outputs.batch_mean, [1, sign * np.inf, 1])
    np.testing.assert_array_equal(outputs.batch_variance, [0, np.nan, 0])
    if count > 8:
        values[1, place // 2] = -sign * np.inf
        if place // 2 != place:
            np.testing.assert_array_equal(moments(family, values, data_format).batch_mean, [1, np.nan, 1])


@pytest.mark.sampled
@by_format
@pytest.mark.parametrize("count", [96, 33_333])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("deviation", "of_dy"),
    [(1.0, 1e-30), (1.0, 1e32), (1e16, 1e-14), (1e18, 1e-10), (1e18, 1e30), (1e-16, 1e-20), (1e-16, 1e15)],
)
def test_batch_norm_gradient(
    family: Family, data_format: str, count: int, is_training: bool, deviation: float, of_dy: float
) -> None:
    normal = noise(3, count)
    x = (normal * deviation).astype(np.float32)
    dy = ((noise(6, count)[3:] + normal) * of_dy).astype(np.float32)
    wide, of_y, ones = x.astype(np.float64), dy.astype(np.float64), np.ones(3, np.float32)
    mean, variance = wide.mean(axis=1).astype(np.float32), wide.var(axis=1).astype(np.float32)
    inputs = batch_norm.GradInputs(images(dy, data_format), images(x, data_format), ones, mean, variance)
    attributes = batch_norm.GradAttributes(0.0, data_format, is_training)
    outputs = family(CpuBatchNorm).gradient(inputs, attributes, batch_norm.plan_gradient(inputs, attributes).geometry)
    factor = 1 / np.sqrt(variance.astype(np.float64))[:, None]
    n = (wide - mean[:, None]) * factor
    expected = factor * of_y
    if is_training:
        expected = factor * (of_y - of_y.mean(axis=1)[:, None] - n * (of_y * n).mean(axis=1)[:, None])
    near(outputs.x_backprop, images(expected, data_format), 1e-5, "x_backprop")
    near(outputs.scale_backprop, (of_y * n).sum(axis=1), 1e-5, "scale_backprop")
    allowed = 1e-5 * np.abs(of_y).sum(axis=1)
    assert (np.abs(outputs.offset_backprop - of_y.sum(axis=1)) <= allowed).all()
