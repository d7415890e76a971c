"""What layers compute, without a socket: every case recorded from TensorFlow, and moments with weights."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import make_layer_families
from gradserve_server.layers.batch_norm.weighted_batch import MomentsGradient, WeightedBatch
from gradserve_server.ops.activation.spec import FAMILY as ACTIVATION
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM
from gradserve_server.ops.batch_norm.spec import Geometry
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from tests.golden.batch_norm_layer import LayerCase, load_layer_cases
from tests.layers.bench import LayerBench, backward, forward
from tests.layers.recorded import check_recorded

_DEVICE = CpuDevice(BufferPool(1 << 20))

CASES = load_layer_cases()
WITH_RELU = [case for case in CASES if case.arguments.get("activation_fn") == "relu"]
SAMPLE = [case for case in CASES if case not in WITH_RELU][::4]


@pytest.fixture(scope="module")
def kernels(_compiled_kernels: None) -> Iterator[Mapping[str, Family]]:
    """Families whose kernels are prepared."""
    parallel = ForkJoin(2)
    ops = make_families(_DEVICE, parallel)
    for name in (BATCH_NORM, ACTIVATION):
        ops[name].prepare(lambda: False)
    yield {**ops, **make_layer_families(_DEVICE, ops)}
    parallel.close()


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_tensorflows(case: LayerCase) -> None:
    check_recorded(case, LayerBench)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", [*WITH_RELU, *SAMPLE], ids=str)
def test_it_is_tensorflows_by_kernels(case: LayerCase, kernels: Mapping[str, Family]) -> None:
    check_recorded(case, lambda: LayerBench(device=_DEVICE, families=kernels))


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
def test_a_relu_is_computed_along_and_keeps_nothing(kernels: Mapping[str, Family], is_training: bool) -> None:
    x = np.random.default_rng(5).normal(0, 1, (4, 5, 5, 3)).astype(np.float32)
    kept, outputs, gradients = {}, {}, {}
    for activation_fn in (None, "relu", "relu6"):
        layer = LayerBench(device=_DEVICE, families=kernels).layer(activation_fn=activation_fn, scale=True)
        made = forward(layer, x, is_training)
        kept[activation_fn], outputs[activation_fn] = layer.forwards.num_bytes, made.outputs
        gradients[activation_fn] = backward(layer, made.forward_id, x).inputs_gradient
    assert kept["relu"] == kept[None] == kept["relu6"] - x.nbytes
    # No output is above 6.
    assert np.array_equal(outputs["relu"], outputs["relu6"])
    np.testing.assert_allclose(gradients["relu"], gradients["relu6"], 1e-5, 1e-6)


@pytest.mark.parametrize(("deviation", "of_g"), [(1.0, 1.0), (1e16, 1e-14), (1e18, 1e-10), (1e-16, 1e-15)])
def test_the_inputs_gradient_keeps_its_digits(deviation: float, of_g: float) -> None:
    random = np.random.default_rng(3)
    x = (random.normal(0, deviation, (6, 4, 3, 1))).astype(np.float32)
    g = random.normal(0, of_g, x.shape) + x / deviation * of_g
    weights = random.uniform(0.5, 2, 6)
    batch = WeightedBatch.of(x, weights, Geometry(outer=24, channels=3, inner=1))
    wide, each = x.astype(np.float64), weights[:, None, None, None]
    mean = ((each * wide).sum(axis=(0, 1, 3)) / (4 * weights.sum())).astype(np.float32)
    centered = wide - mean[:, None]
    inverse = 1 / np.sqrt((each * centered**2).sum(axis=(0, 1, 3)) / (4 * weights.sum()))
    xhat = centered * inverse[:, None]
    totals, dots = g.sum(axis=(0, 1, 3)), (g * xhat).sum(axis=(0, 1, 3))
    found = batch.inputs_gradient(np, MomentsGradient(mean, inverse, totals, dots))
    expected = -each / (4 * weights.sum()) * inverse[:, None] * (totals[:, None] + xhat * dots[:, None])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.astype(np.float64), expected, 0, 1e-6 * np.abs(expected).max())
