"""The batch_norm layer on a real GPU: every recorded case, and a server that serves it."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import make_layer_families
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_testing import LocalServer
from tests.golden.batch_norm_layer import LayerCase, assert_call, load_layer_cases
from tests.layers.bench import LayerBench
from tests.layers.recorded import GRADIENTS, check_recorded
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::gradserve.IgnoredArgumentWarning")]

NUM_WORKERS = 8
NUM_STEPS = 20
X = np.random.RandomState(0).standard_normal((16, 14, 14, 64)).astype(np.float32)
DY = np.random.RandomState(1).standard_normal(X.shape).astype(np.float32)

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused, gelu": ({"activation_fn": "gelu"}, {}),
    "in place, relu": ({"activation_fn": "relu", "updates_collections": None}, {}),
    "weights": ({}, {"batch_weights": np.linspace(0, 1, 16, dtype=np.float32)}),
    "zero debias": ({"zero_debias_moving_mean": True}, {}),
    "renorm": ({"renorm": True, "renorm_clipping": {"rmax": 1.5, "dmax": 0.5}}, {}),
    "renorm as it was": ({"renorm": True, "renorm_zero_debias": True}, {}),
    "adjustment of items": (
        {},
        {"adjustment": (np.linspace(0.9, 1.1, 16, dtype=np.float32).reshape(16, 1, 1, 1), np.zeros(1, np.float32))},
    ),
    "drawn adjustment": (
        {"adjustment": gradserve.RandomAdjustment(scale=(0.93, 1.07), bias=(-0.1, 0.1), seed=1)},
        {},
    ),
    "regularizers": (
        {"param_regularizers": {"gamma": gradserve.Regularizer("l1_l2", l1=0.1, l2=0.2)}},
        {},
    ),
}


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture(scope="module")
def families(device: CudaDevice) -> Mapping[str, Family]:
    ops = make_families(device, ForkJoin(1))
    return {**ops, **make_layer_families(device, ops)}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cuda:0"))) as local:
        yield local


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[gradserve.Client]:
    # The first calls compile.
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[gradserve.Client]:
    config = ServerConfig(runtime=RuntimeConfig(device="cpu"))
    with LocalServer(config) as local, gradserve.connect(local.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.mark.parametrize("case", load_layer_cases(), ids=str)
def test_it_is_tensorflows(device: CudaDevice, families: Mapping[str, Family], case: LayerCase) -> None:
    check_recorded(case, lambda: LayerBench(device=device, families=families))


@pytest.mark.parametrize("case", load_layer_cases()[::7], ids=str)
def test_it_is_tensorflows_when_served(client: gradserve.Client, case: LayerCase) -> None:
    first, arguments = case.steps[0], dict(case.arguments)
    regularizers = {
        name: gradserve.Regularizer(plain["regularizer"][0], **plain["regularizer"][1])
        for name, plain in arguments.pop("param_regularizers", {}).items()
    }
    with client.batch_norm(param_regularizers=regularizers, **arguments) as layer:
        forward = layer.forward(
            first.x, case.is_training, first.batch_weights, first.adjustment, keep_for_backward=True
        )
        gradients = vars(layer.backward(first.dy, forward))
    found = {name: gradients["inputs" if name == "x" else name] for name in GRADIENTS}
    assert_call(case.first, forward.outputs, found)


@pytest.mark.parametrize(("arguments", "call"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("keep", [False, True], ids=["inline", "kept"])
def test_it_is_the_cpus(
    client: gradserve.Client, on_cpu: gradserve.Client, arguments: dict[str, Any], call: dict[str, Any], keep: bool
) -> None:
    """Three steps of training with everything that is left on the server, then one call in inference."""
    results = []
    for each in (client, on_cpu):
        with each.batch_norm(scale=True, decay=0.9, **arguments) as layer:
            found: dict[str, Any] = {}
            for step in range(3):
                forward: Any = layer.forward(each.put(X) if keep else X, keep=keep, **call)
                gradients = layer.backward(each.put(DY) if keep else DY, forward, keep=keep)
                layer.run_updates()
                pair = {"y": forward.outputs, "dx": gradients.inputs}
                found |= {f"{name}/{step}": each.get(array) if keep else array for name, array in pair.items()}
            found |= layer.variables
            found |= {f"loss/{name}": loss for name, loss in forward.regularization_losses.items()}
            found["inference"] = layer(X, is_training=False)
            results.append(found)
    on_gpu, expected = results
    assert set(on_gpu) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(on_gpu[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_workers_share_a_layer(client: gradserve.Client) -> None:
    """Each with its own inputs; variables and what is saved go from stream to stream."""
    start = threading.Barrier(NUM_WORKERS)
    layer = client.batch_norm(scale=True, decay=0.0, updates_collections=None, activation_fn="gelu")
    inputs = [X + worker for worker in range(NUM_WORKERS)]
    alone = [_step(layer, x) for x in inputs]

    def work(worker: int) -> bool:
        start.wait()
        return all(_step(layer, inputs[worker]) == alone[worker] for _ in range(NUM_STEPS))

    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        assert all(threads.map(work, range(NUM_WORKERS)))
    assert layer.describe().num_updates == NUM_WORKERS * (NUM_STEPS + 1)
    # With decay 0 the averages are those of whoever came last, never a mixture of two.
    mean = layer.variables["moving_mean"]
    assert any(np.allclose(mean, x.mean((0, 1, 2)), atol=1e-5) for x in inputs)


def _step(layer: gradserve.BatchNormLayer, x: np.ndarray) -> tuple[bytes, bytes]:
    forward = layer.forward(x)
    return forward.outputs.tobytes(), layer.backward(DY, forward).inputs.tobytes()
