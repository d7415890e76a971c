"""A sharded accumulator computes the same bits as a whole one, on however many servers it is."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import DenseSpec, IndexedSlices, SparseSpec
from gradserve_protocol.arrays import parse_dtype
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_server.rpc.accumulators.requests import decode_gradient
from gradserve_server.tensors.payload import NO_PAYLOAD
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import small_pieces

SIZES = (1, 2, 3)
DTYPES = ("float16", "bfloat16", "float32", "float64")
WEIGHTS = (1.0, 0.1, 3.0, 2.5e-3)
MODEL = {
    f"{kind}-{dtype}": (DenseSpec if kind == "dense" else SparseSpec)(dtype, (11, 3))
    for kind in ("dense", "sparse")
    for dtype in DTYPES
}


@pytest.fixture(scope="module", params=SIZES)
def client(request: pytest.FixtureRequest) -> Iterator[gradserve.Client]:
    with (
        small_pieces(),
        running_cluster(request.param) as servers,
        gradserve.connect(addresses_of(servers)) as connected,
    ):
        yield connected


def _gradients() -> list[dict[str, Any]]:
    random = np.random.default_rng(7)
    gradients = []
    for _ in WEIGHTS:
        values = {}
        for name in MODEL:
            kind, _, dtype = name.partition("-")
            rows = random.permutation(11)[:6]
            array = random.normal(size=(11, 3)).astype(parse_dtype(dtype))
            values[name] = array if kind == "dense" else IndexedSlices(array[np.sort(rows)], np.sort(rows))
        gradients.append(values)
    return gradients


def _bits(average: gradserve.Average) -> dict[str, tuple[bytes, bytes]]:
    return {
        name: (value.values.tobytes(), value.indices.tobytes())
        if isinstance(value, IndexedSlices)
        else (value.tobytes(), b"")
        for name, value in average.items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("accumulate_dtype", [None, "float64"])
def test_deterministic_averages_are_bit_equal(
    client: gradserve.Client, server_address: str, reduction: str, accumulate_dtype: str | None
) -> None:
    """Whatever the order of arrival, and like on one server as a whole."""
    options: Any = {"reduction_type": reduction, "accumulate_dtype": accumulate_dtype, "deterministic": True}
    gradients = _gradients()
    found = []
    num_servers = len(client.address.split(","))
    with gradserve.connect(server_address) as one:
        whole = one.gradient_accumulator(MODEL, **options)
        net = client.gradient_accumulator(MODEL, sharded=True if num_servers > 1 else None, **options)
        orders = list(itertools.permutations(range(len(WEIGHTS))))[::5]
        for step, order in enumerate(orders):
            for each in (whole, net):
                for number in order:
                    each.apply_grad(gradients[number], step, weight=WEIGHTS[number], worker_id=f"worker-{number}")
                found.append(_bits(each.take_grad(len(order))))
    assert all(each == found[0] for each in found)


def test_averages_in_order_of_arrival_are_those_of_one_server(client: gradserve.Client, server_address: str) -> None:
    gradients = _gradients()
    num_servers = len(client.address.split(","))
    with gradserve.connect(server_address) as one:
        whole = one.gradient_accumulator(MODEL)
        net = client.gradient_accumulator(MODEL, sharded=True if num_servers > 1 else None)
        for each in (whole, net):
            for number in (2, 0, 3, 1):
                each.apply_grad(gradients[number], 0, weight=WEIGHTS[number])
        taken, expected = net.take_grad(4), whole.take_grad(4)
    assert _bits(taken) == _bits(expected)
    assert taken.total_weight == expected.total_weight == sum(WEIGHTS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_are_added_from_left_to_right(client: gradserve.Client, deterministic: bool) -> None:
    """As a round does it, one by one: sum() compensates since Python 3.12, and math.fsum always does."""
    weights = (0.1, 0.2, 0.3)
    total = (0.1 + 0.2) + 0.3
    assert total != math.fsum(weights), "the weights tell the sums apart"
    values = np.random.default_rng(3).standard_normal((11, 3))
    is_sharded = True if len(client.address.split(",")) > 1 else None
    acc = client.gradient_accumulator({"w": values}, sharded=is_sharded, deterministic=deterministic)
    expected = np.zeros_like(values)
    for number, weight in enumerate(weights):
        acc.apply_grad({"w": values * (number + 1)}, weight=weight, worker_id=str(number))
        expected += values * (number + 1) * weight
    average = acc.take_grad(len(weights))
    assert average.total_weight == total
    assert average["w"].tobytes() == (expected / total).tobytes()


def test_a_sum_weighs_what_its_gradients_weigh_one_by_one() -> None:
    request = messages_pb2.ApplyGradientRequest()
    for weight in (0.1, 0.2, 0.3):
        request.sum_of.add(weight=weight)
    _, contribution, _ = decode_gradient(request, NO_PAYLOAD)
    assert contribution.weight == (0.1 + 0.2) + 0.3
