"""A client of several servers has the same calls as that of one."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.testing import ServerThread
from gradserve.transport.settings import TransportName
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, name_at, running_cluster

SIZE = 3
GRADIENT = {"w": np.arange(3, dtype=np.float32)}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(SIZE) as servers:
        yield servers


@pytest.fixture(params=["grpc", "bulk", "shared_memory"])
def client(servers: list[LocalServer], request: pytest.FixtureRequest) -> Iterator[gradserve.Client]:
    with gradserve.connect(addresses_of(servers), transport=request.param) as connected:
        yield connected


def _names_on(server: LocalServer) -> set[str]:
    with gradserve.connect(server.address) as one:
        return {info.name for info in one.list_accumulators()}


def test_each_accumulator_is_on_its_home(client: gradserve.Client, servers: list[LocalServer], name: str) -> None:
    names = [name_at(home, SIZE, f"{name}-") for home in range(SIZE)]
    for each in names:
        client.gradient_accumulator(GRADIENT, each)
    assert [set(names) & _names_on(server) for server in servers] == [{each} for each in names]
    assert set(names) <= {info.name for info in client.list_accumulators()}
    assert [client.delete_accumulator(each) for each in names] == [True] * SIZE
    assert not set(names) & {info.name for info in client.list_accumulators()}


@pytest.mark.parametrize("home", range(SIZE))
def test_every_call(client: gradserve.Client, name: str, home: int) -> None:
    net = client.gradient_accumulator(GRADIENT, name_at(home, SIZE, f"{name}-"), keep_averages=2)
    assert net.apply_grad(GRADIENT, 0, worker_id="a").outcome is gradserve.Outcome.ACCEPTED
    assert net.num_accumulated() == 1
    pulled = net.push_pull({"w": 3 * GRADIENT["w"]}, 2, 0, worker_id="b")
    np.testing.assert_array_equal(pulled["w"], 2 * GRADIENT["w"])
    np.testing.assert_array_equal(net.read_average(1)["w"], pulled["w"])
    net.apply_grad(GRADIENT, 1)
    np.testing.assert_array_equal(net.take_grad(1)["w"], GRADIENT["w"])
    net.set_global_step(7)
    info = net.info()
    assert (info.global_step, info.kept_steps) == (7, (1, 2))
    with pytest.raises(gradserve.StaleGradientError):
        net.push_pull(GRADIENT, 1, 3)
    assert net.delete()
    with pytest.raises(gradserve.NotFoundError):
        net.info()


@pytest.mark.parametrize("home", range(SIZE))
def test_large_gradients(client: gradserve.Client, name: str, home: int) -> None:
    """Over gRPC they are uploaded first, to the same server."""
    large = {"w": np.arange(1 << 20, dtype=np.float32)}
    net = client.gradient_accumulator(large, name_at(home, SIZE, f"{name}-"))
    np.testing.assert_array_equal(net.push_pull(large, 1, 0)["w"], large["w"])
    net.delete()
    assert client.list_tensors() == []


@pytest.mark.parametrize("home", range(SIZE))
def test_raw_ops(client: gradserve.Client, name: str, home: int) -> None:
    shared_name = name_at(home, SIZE, f"{name}-")
    ops = client.raw_ops
    handle = ops.ResourceConditionalAccumulator(dtype="float32", shape=(3,), shared_name=shared_name)
    ops.ResourceAccumulatorApplyGradient(handle=handle, local_step=0, gradient=GRADIENT["w"])
    assert ops.ResourceAccumulatorNumAccumulated(handle=handle) == 1
    with pytest.raises(gradserve.AlreadyExistsError):
        client.gradient_accumulator(GRADIENT, shared_name)
    taken = ops.ResourceAccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32")
    np.testing.assert_array_equal(taken, GRADIENT["w"])


def test_private_accumulators_are_spread_and_end_with_the_client(servers: list[LocalServer]) -> None:
    before = [_names_on(server) for server in servers]
    with gradserve.connect(addresses_of(servers)) as client:
        made = [client.conditional_accumulator("float32", ()) for _ in range(30)]
        during = [_names_on(server) - old for server, old in zip(servers, before, strict=True)]
        assert all(during)
        assert sum(map(len, during)) == len(made)
        for each in made:
            each.apply_grad(1.0)
    assert [_names_on(server) for server in servers] == before


def test_one_client_waits_on_several_servers(client: gradserve.Client, name: str) -> None:
    nets = [client.gradient_accumulator(GRADIENT, name_at(home, SIZE, f"{name}-")) for home in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as threads:
        takes = [threads.submit(net.take_grad, 2) for net in nets]
        for _ in range(2):
            for net in reversed(nets):
                net.apply_grad(GRADIENT)
        for take in takes:
            np.testing.assert_array_equal(take.result()["w"], GRADIENT["w"])


def test_tensors_ops_and_layers_are_on_the_first_server(client: gradserve.Client, servers: list[LocalServer]) -> None:
    handle = client.put(GRADIENT["w"])
    with gradserve.connect(servers[0].address) as first:
        np.testing.assert_array_equal(first.get(handle), GRADIENT["w"])
    np.testing.assert_array_equal(client.get(handle), GRADIENT["w"])
    layer = client.batch_norm(scope=None, input_shape=(None, 3), dtype="float32")
    layer.forward(np.ones((4, 3), np.float32), is_training=True)
    with gradserve.connect(servers[0].address) as first:
        assert len(first.list_batch_norm_layers()) == len(client.list_batch_norm_layers()) == 1
        assert first.server_info().incarnation == client.server_info().incarnation
    client.delete(handle)


@pytest.mark.parametrize("home", range(SIZE))
def test_a_handle_can_be_given_to_accumulators_of_the_first_server(
    client: gradserve.Client, name: str, home: int
) -> None:
    net = client.gradient_accumulator(GRADIENT, name_at(home, SIZE, f"{name}-"))
    handle = client.put(GRADIENT["w"])
    try:
        if home == 0:
            net.apply_grad({"w": handle})
        else:
            with pytest.raises(gradserve.InvalidArgumentError, match=f"tensors are on server 0.* on server {home}"):
                net.apply_grad({"w": handle})
    finally:
        client.delete(handle)


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_with_asyncio(servers: list[LocalServer], name: str, way: TransportName) -> None:
    names = [name_at(home, SIZE, f"{name}-") for home in range(SIZE)]

    async def run() -> list[gradserve.PushPullResult]:
        async with gradserve.aio.connect(addresses_of(servers), transport=way) as client:
            nets = [await client.gradient_accumulator(GRADIENT, each) for each in names]
            pulled = await asyncio.gather(*[net.push_pull(GRADIENT, 1, 0) for net in nets])
            assert set(names) <= {info.name for info in await client.list_accumulators()}
            await client.conditional_accumulator("float32", ())
            return pulled

    for average in asyncio.run(run()):
        np.testing.assert_array_equal(average["w"], GRADIENT["w"])


@pytest.mark.parametrize("given", [lambda each: each, ",".join, lambda each: f" {' , '.join(each)} ", tuple])
def test_how_addresses_are_given(servers: list[LocalServer], name: str, given: Callable[[list[str]], Any]) -> None:
    addresses = addresses_of(servers)
    with gradserve.connect(given(addresses)) as client:
        assert client.address == ",".join(addresses)
        client.conditional_accumulator("float32", (), name_at(2, SIZE, f"{name}-")).delete()


def test_a_cluster_of_one(name: str) -> None:
    with ServerThread(cluster="alone") as server, gradserve.connect([server.address]) as client:
        client.conditional_accumulator("float32", (), name).apply_grad(1.0)
