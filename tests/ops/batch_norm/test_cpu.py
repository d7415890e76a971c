"""FusedBatchNorm on the host gives what the reference gives in float64."""

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    plan_forward,
)
from tests.ops.batch_norm.cases import (
    SHAPES,
    TOLERANCES,
    check_forward,
    check_gradient,
    check_relu,
    data_format,
    forward,
    forward_inputs,
    grad_inputs,
    gradient,
    make_x,
    unprepared,
)
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def batch_norm(parallel: ForkJoin, _compiled_kernels: None) -> CpuBatchNorm:
    prepared = unprepared(parallel)
    prepared.prepare(lambda: False)
    return prepared


@pytest.fixture(scope="module")
def on_threads(_compiled_kernels: None) -> Iterator[list[CpuBatchNorm]]:
    """On one thread, two and five."""
    fork_joins = [ForkJoin(num_threads) for num_threads in (1, 2, 5)]
    prepared = [unprepared(fork_join) for fork_join in fork_joins]
    for each in prepared:
        each.prepare(lambda: False)
    yield prepared
    for fork_join in fork_joins:
        fork_join.close()


by_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: dtype.__name__)


by_format = pytest.mark.parametrize("channels_first", [False, True], ids=["channels last", "channels first"])


by_mode = pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])


by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.sampled
@by_dtype
@by_format
@by_mode
@by_shape
def test_like_the_reference(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool, is_training: bool, shape: tuple[int, ...]
) -> None:
    x, name = make_x(shape, channels_first, dtype), data_format(shape, channels_first)
    check_forward(batch_norm, forward_inputs(x, shape[-1]), ForwardAttributes(1e-3, 1.0, name, is_training))
    check_gradient(batch_norm, grad_inputs(x, shape[-1]), GradAttributes(1e-3, name, is_training))
    check_relu(batch_norm, forward_inputs(x, shape[-1]), name, is_training)


@by_dtype
@by_format
def test_the_gradient_of_a_relu_knows_every_sign_of_the_forward(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool
) -> None:
    # Half of xhat is about 1, half about -1, so that y is 2 scale or a rounding error, and not 0 even for float16.
    shape, channels, rng = (9, 16, 16, 50), 50, np.random.default_rng(4)
    signs = np.where(np.arange(9 * 256) % 2, 1, -1).reshape(9, 16, 16, 1)
    x = rng.uniform(0.5, 2, channels) * signs + rng.normal(0, np.finfo(np.float32).eps, shape)
    x = x.astype(dtype)
    x = np.ascontiguousarray(np.moveaxis(x, -1, 1)) if channels_first else x
    name, inputs = data_format(shape, channels_first), forward_inputs(x, channels)
    inputs = replace(inputs, scale=1024 * inputs.scale, offset=1024 * inputs.scale)
    attributes = ForwardAttributes(0.0, data_format=name)
    geometry = plan_forward(inputs, attributes).geometry
    outputs = batch_norm.forward(inputs, attributes, geometry, has_relu=True)
    given = GradInputs(np.ones_like(x), x, inputs.scale, outputs.reserve_space_1, outputs.reserve_space_2)
    gradients = batch_norm.gradient(given, GradAttributes(0.0, name), geometry, inputs.offset)
    axes = (0, 2, 3) if channels_first else (0, 1, 2)
    positive = (outputs.y > 0).sum(axes)
    assert 9 * 128 <= positive.min() < positive.max()
    assert np.array_equal(gradients.offset_backprop, positive)
    frozen = batch_norm.gradient(given, GradAttributes(0.0, name, is_training=False), geometry, inputs.offset)
    assert np.array_equal(frozen.x_backprop > 0, outputs.y > 0)


@by_dtype
@by_format
@pytest.mark.parametrize("is_prepared", [True, False], ids=["kernels", "NumPy"])
def test_a_relu_at_the_corner_and_of_what_is_not_finite(
    batch_norm: CpuBatchNorm, parallel: ForkJoin, dtype: Any, channels_first: bool, is_prepared: bool
) -> None:
    x = np.array([-1, -0.0, 0, 1, np.inf, -np.inf, np.nan])
    y = np.array([0, 0, 0, 1, np.inf, 0, np.nan])
    dy = np.array([np.nan, 3, np.inf, 3, 3, 3, 3])
    x_backprop = np.array([0, 0, 0, 3, 3, 0, 0])
    shape = (2, 40, 20, 7) if channels_first else (2, 20, 7, 40)

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        along = values if channels_first else values[:, None]
        return np.broadcast_to(along, shape).astype(dtype)

    computing, name = batch_norm if is_prepared else unprepared(parallel), data_format(shape, channels_first)
    inputs = forward_inputs(spread(x), 40)
    ones, zeros = np.ones_like(inputs.scale), np.zeros_like(inputs.scale)
    inputs = ForwardInputs(inputs.x, ones, zeros, zeros, ones)
    attributes = ForwardAttributes(0.0, data_format=name, is_training=False)
    geometry = plan_forward(inputs, attributes).geometry
    outputs = computing.forward(inputs, attributes, geometry, has_relu=True)
    assert np.array_equal(outputs.y.astype(np.float64), spread(y).astype(np.float64), equal_nan=True)
    gradients = computing.gradient(
        GradInputs(spread(dy), inputs.x, ones, zeros, ones), GradAttributes(0.0, name, False), geometry, zeros
    )
    assert np.array_equal(gradients.x_backprop, spread(x_backprop))
    assert np.array_equal(gradients.offset_backprop, np.full_like(zeros, 6 * 40))


@by_dtype
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0])
def test_moving_averages(batch_norm: CpuBatchNorm, dtype: Any, factor: float) -> None:
    inputs = forward_inputs(make_x((3, 7, 5, 6), False, dtype), 6)
    check_forward(batch_norm, inputs, ForwardAttributes(exponential_avg_factor=factor))
    if factor == 0:
        outputs = forward(batch_norm, inputs, ForwardAttributes(exponential_avg_factor=factor))
        assert np.array_equal(outputs.batch_mean, inputs.mean)
        assert np.array_equal(outputs.batch_variance, inputs.variance)


def test_mean_and_variance_are_not_read_where_they_have_no_meaning(batch_norm: CpuBatchNorm) -> None:
    x = make_x((3, 7, 5, 6), False, np.float32)
    inputs = forward_inputs(x, 6)
    nothing = np.empty(0, np.float32)
    check_forward(batch_norm, ForwardInputs(x, inputs.scale, inputs.offset, nothing, nothing), ForwardAttributes())


@by_dtype
@by_format
@by_mode
@pytest.mark.parametrize("shape", [(0, 7, 5, 3), (2, 0, 5, 3), (2, 7, 5, 0)], ids=str)
def test_empty(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool, is_training: bool, shape: tuple[int, ...]
) -> None:
    x, name = make_x(shape, channels_first, dtype), data_format(shape, channels_first)
    check_forward(batch_norm, forward_inputs(x, shape[-1]), ForwardAttributes(1e-3, 1.0, name, is_training))
    check_gradient(batch_norm, grad_inputs(x, shape[-1]), GradAttributes(1e-3, name, is_training))
    check_relu(batch_norm, forward_inputs(x, shape[-1]), name, is_training)


@by_format
@pytest.mark.parametrize("shape", [(8, 40, 40, 3), (2, 5, 5, 200)], ids=str)
@pytest.mark.parametrize(
    ("change", "rounding"),
    [
        # x - mean cannot be better than float32 has the mean.
        pytest.param(lambda x: x + 1e4, 2e-3, id="large mean"),
        pytest.param(lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, np.float32(1e6), x), 0, id="outlier"),
        pytest.param(lambda x: x * np.float32(1e-15), 0, id="tiny"),
        pytest.param(lambda x: x * np.float32(1e15), 0, id="huge"),
    ],
)
def test_hard_numbers(
    batch_norm: CpuBatchNorm, channels_first: bool, shape: tuple[int, ...], change: Any, rounding: float
) -> None:
    x = change(make_x(shape, channels_first, np.float32, 0, 1)).astype(np.float32)
    attributes = ForwardAttributes(1e-36, data_format=data_format(shape, channels_first))
    check_forward(batch_norm, forward_inputs(x, shape[-1]), attributes, rounding)


@by_dtype
@by_format
@by_mode
@pytest.mark.parametrize("epsilon", [0.0, -1e9], ids=["zero", "negative"])
def test_epsilons_that_make_nan(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool, is_training: bool, epsilon: float
) -> None:
    shape = (2, 7, 5, 3)
    x, name = np.zeros_like(make_x(shape, channels_first, dtype)), data_format(shape, channels_first)
    inputs = forward_inputs(x, 3)
    zeros = np.zeros_like(inputs.scale)
    inputs = ForwardInputs(x, inputs.scale, inputs.offset, zeros, zeros)
    check_forward(batch_norm, inputs, ForwardAttributes(epsilon, 1.0, name, is_training))
    outputs = gradient(
        batch_norm, GradInputs(x, x, inputs.scale, zeros, zeros), GradAttributes(epsilon, name, is_training)
    )
    assert np.isnan(outputs.x_backprop.astype(np.float32)).all()
    assert np.isnan(outputs.scale_backprop).all()
    assert not np.isnan(outputs.offset_backprop).any()


@pytest.mark.sampled
@by_dtype
@by_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, -1], ids=["first", "second", "last"])
@pytest.mark.parametrize("shape", [(2, 7, 5, 3), (3, 1, 1, 70)], ids=str)
def test_what_is_not_finite_stays_in_its_channel(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool, bad: float, position: int, shape: tuple[int, ...]
) -> None:
    axis, channels = (1 if channels_first else 3), shape[-1]
    x, name = make_x(shape, channels_first, dtype), data_format(shape, channels_first)
    broken = x.copy()
    np.moveaxis(broken, axis, 0)[1].flat[position] = bad
    others = [0, *range(2, channels)]
    want = forward(batch_norm, forward_inputs(x, channels), ForwardAttributes(data_format=name))
    got = forward(batch_norm, forward_inputs(broken, channels), ForwardAttributes(data_format=name))
    assert not np.isfinite(np.moveaxis(got.y, axis, 0)[1].astype(np.float32)).any()
    assert not np.isfinite(got.batch_mean[1])
    assert not np.isfinite(got.batch_variance[1])
    assert np.array_equal(np.moveaxis(got.y, axis, 0)[others], np.moveaxis(want.y, axis, 0)[others])
    assert np.array_equal(got.batch_variance[others], want.batch_variance[others])
    want_grad = gradient(batch_norm, grad_inputs(x, channels), GradAttributes(data_format=name))
    got_grad = gradient(batch_norm, grad_inputs(broken, channels), GradAttributes(data_format=name))
    assert not np.isfinite(got_grad.scale_backprop[1])
    assert not np.isfinite(np.moveaxis(got_grad.x_backprop, axis, 0)[1].astype(np.float32)).any()
    assert np.array_equal(
        np.moveaxis(got_grad.x_backprop, axis, 0)[others], np.moveaxis(want_grad.x_backprop, axis, 0)[others]
    )
    # Frozen, x has no part in x_backprop.
    frozen = gradient(batch_norm, grad_inputs(broken, channels), GradAttributes(data_format=name, is_training=False))
    assert np.isfinite(frozen.x_backprop.astype(np.float32)).all()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.0009765625, 1 / 3, 3.0, 1e-3, 1e30])
@by_format
def test_every_number_of_half_the_precision_is_read_and_rounded_to_nearest(
    batch_norm: CpuBatchNorm, dtype: Any, scale: float, channels_first: bool
) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(1, 2, 2**7, 2**8)
    name = "NCHW" if channels_first else "NHWC"
    channels = 2 if channels_first else 2**8
    zeros, ones = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    factor = np.float32(scale) * ones
    outputs = forward(
        batch_norm, ForwardInputs(x, factor, zeros, zeros, ones), ForwardAttributes(0.0, 1.0, name, False)
    )
    with np.errstate(all="ignore"):
        expected = (x.astype(np.float32) * np.float32(scale)).astype(dtype)
    assert np.array_equal(np.isnan(outputs.y.astype(np.float32)), np.isnan(expected.astype(np.float32)))
    numbers = ~np.isnan(expected.astype(np.float32))
    assert np.array_equal(outputs.y[numbers], expected[numbers])


def results(batch_norm: CpuBatchNorm, x: NDArray[Any], channels: int, name: str) -> list[bytes]:
    images, attributes = forward_inputs(x, channels), ForwardAttributes(data_format=name)
    grads, grad_attributes = grad_inputs(x, channels), GradAttributes(data_format=name)
    geometry = plan_forward(images, attributes).geometry
    outputs = (
        batch_norm.forward(images, attributes, geometry),
        batch_norm.forward(images, attributes, geometry, has_relu=True),
        batch_norm.gradient(grads, grad_attributes, geometry),
        batch_norm.gradient(grads, grad_attributes, geometry, images.offset),
    )
    return [value.tobytes() for output in outputs for value in vars(output).values()]


@pytest.mark.sampled
@by_format
@pytest.mark.parametrize("shape", [(65, 64, 64, 3), (16, 9, 9, 300), (257, 3, 3, 200)], ids=str)
def test_the_same_bits_every_time_on_any_number_of_threads(
    on_threads: list[CpuBatchNorm], channels_first: bool, shape: tuple[int, ...]
) -> None:
    x, name = make_x(shape, channels_first, np.float32), data_format(shape, channels_first)
    bits = [results(batch_norm, x, shape[-1], name) for batch_norm in on_threads for _ in range(4)]
    assert all(other == bits[0] for other in bits)


def test_several_threads_at_once(batch_norm: CpuBatchNorm) -> None:
    shapes = [(17, 64, 64, 3), (16, 9, 9, 300), (40, 31, 31, 16), (2, 3, 3, 5)]
    calls = [
        (make_x(shape, first, np.float32), shape[-1], data_format(shape, first))
        for shape, first in zip(shapes, (False, True, True, False), strict=True)
    ]
    expected = [results(batch_norm, *call) for call in calls]
    same: list[bool] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait()
        same.extend(results(batch_norm, *calls[turn % 4]) == expected[turn % 4] for turn in range(index, index + 8))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 32


@pytest.mark.sampled
@by_dtype
@by_format
@by_mode
@pytest.mark.parametrize("shape", [(32, 64, 64, 16), (512, 3, 3, 400)], ids=str)
def test_no_temporary_of_the_size_of_x(
    batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool, is_training: bool, shape: tuple[int, ...]
) -> None:
    x, name = make_x(shape, channels_first, dtype), data_format(shape, channels_first)
    inputs, grads = forward_inputs(x, shape[-1]), grad_inputs(x, shape[-1])
    attributes = ForwardAttributes(data_format=name, is_training=is_training)
    grad_attributes = GradAttributes(data_format=name, is_training=is_training)
    geometry = plan_forward(inputs, attributes).geometry
    tracemalloc.start()
    for has_relu in (False, True):
        batch_norm.forward(inputs, attributes, geometry, has_relu=has_relu)
    batch_norm.gradient(grads, grad_attributes, geometry)
    batch_norm.gradient(grads, grad_attributes, geometry, inputs.offset)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 4


@by_dtype
@by_format
def test_inputs_may_be_read_only_and_not_aligned(batch_norm: CpuBatchNorm, dtype: Any, channels_first: bool) -> None:
    shape = (2, 7, 5, 3)
    x, name = make_x(shape, channels_first, dtype), data_format(shape, channels_first)

    def as_received(array: NDArray[Any]) -> NDArray[Any]:
        return np.frombuffer(b"\0" + array.tobytes(), array.dtype, array.size, 1).reshape(array.shape)

    inputs, grads = forward_inputs(x, 3), grad_inputs(x, 3)
    received = ForwardInputs(**{key: as_received(value) for key, value in vars(inputs).items()})
    received_grads = GradInputs(
        **{key: None if value is None else as_received(value) for key, value in vars(grads).items()}
    )
    assert not received.x.flags.aligned
    assert not received.x.flags.writeable
    for is_training in (True, False):
        check_forward(batch_norm, received, ForwardAttributes(data_format=name, is_training=is_training))
        check_gradient(batch_norm, received_grads, GradAttributes(data_format=name, is_training=is_training))
        check_relu(batch_norm, received, name, is_training)


@pytest.mark.sampled
@by_dtype
@pytest.mark.parametrize("num_checks", [0, 1, 7])
def test_calls_are_right_before_all_is_prepared(parallel: ForkJoin, dtype: Any, num_checks: int) -> None:
    batch_norm = unprepared(parallel)
    checks: list[None] = []

    def stop() -> bool:
        checks.append(None)
        return len(checks) >= num_checks

    if num_checks:
        batch_norm.prepare(stop)
    assert len(checks) == num_checks
    x = make_x((2, 7, 5, 3), False, dtype)
    check_forward(batch_norm, forward_inputs(x, 3), ForwardAttributes())
    check_gradient(batch_norm, grad_inputs(x, 3), GradAttributes())
    check_relu(batch_norm, forward_inputs(x, 3), "NHWC", True)


def test_a_call_that_is_not_prepared_warns_of_nothing(parallel: ForkJoin) -> None:
    x = np.zeros((1, 2, 2, 3), np.float32)
    assert np.isnan(forward(unprepared(parallel), forward_inputs(x, 3), ForwardAttributes(-1.0)).y).all()


def test_numba_is_imported_by_preparing_alone() -> None:
    modules = "gradserve_server.app, gradserve_server.ops.batch_norm.cpu"
    script = f"import sys, {modules}; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_SECONDS)
