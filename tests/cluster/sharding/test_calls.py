"""Every call on a sharded accumulator, over each transport."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import ACCEPTED, STALE, IndexedSlices, Outcome
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.cluster.sharding.clients import MODEL, WAYS, gradient, same, shards_of, small_pieces
from tests.servers.polling import growing_limits

SIZE = 3


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(SIZE) as servers, small_pieces():
        yield servers


@pytest.fixture(params=WAYS)
def client(servers: list[LocalServer], request: pytest.FixtureRequest) -> Iterator[gradserve.Client]:
    with gradserve.connect(addresses_of(servers), transport=request.param) as connected:
        yield connected


@pytest.mark.sampled
@pytest.mark.parametrize("home", range(SIZE))
def test_every_call(client: gradserve.Client, servers: list[LocalServer], name: str, home: int) -> None:
    name = name_at(home, SIZE, f"{name}-")
    net = client.gradient_accumulator(MODEL, name, keep_averages=2, sharded=True)
    assert shards_of(name, servers) == [True] * SIZE
    assert net.apply_grad(gradient(1), 0, worker_id="a").outcome is ACCEPTED
    assert net.num_accumulated() == 1
    pulled = net.push_pull(gradient(3), 2, 0, worker_id="b")
    assert (pulled.step, pulled.num_gradients, pulled.worker_ids, pulled.outcome) == (1, 2, ("a", "b"), ACCEPTED)
    same(pulled["kernel"], gradient(2)["kernel"])
    same(pulled["bias"], gradient(2)["bias"])
    same(pulled["scale"], np.float16(2))
    same(pulled["table"], IndexedSlices(np.array([[2, 2], [1, 1], [3, 3]], np.float32), np.array([3, 71, 73])))
    assert list(pulled) == list(MODEL)
    net.apply_grad(gradient(5), 1)
    taken = net.take_grad(1)
    for step, average in ((1, pulled), (2, taken)):
        again = net.read_average(step)
        for component, values in average.items():
            same(again[component], values)
    net.set_global_step(7)
    info = net.info()
    assert (info.global_step, info.kept_steps, info.num_shards, info.device) == (7, (1, 2), SIZE, "cpu")
    assert net.delete()
    assert shards_of(name, servers) == [False] * SIZE
    with pytest.raises(gradserve.NotFoundError):
        net.info()
    with pytest.raises(gradserve.NotFoundError):
        net.apply_grad(gradient(1), 7)
    assert shards_of(name, servers) == [False] * SIZE


@pytest.mark.sampled
@pytest.mark.parametrize("keep_averages", [1, 2, 4, 7])
def test_averages_are_kept(client: gradserve.Client, name: str, keep_averages: int) -> None:
    net = client.gradient_accumulator(MODEL, name, keep_averages=keep_averages, sharded=True)
    for step in range(9):
        net.push_pull(gradient(step), 1, step)
        kept = net.info().kept_steps
        assert kept == tuple(range(max(0, step + 1 - keep_averages) + 1, step + 2))
        for each in kept:
            same(net.read_average(each)["kernel"], gradient(each - 1)["kernel"])
    with pytest.raises(gradserve.OutOfRangeError):
        net.read_average(9 - keep_averages)


def test_large_gradients(client: gradserve.Client, name: str) -> None:
    """Over gRPC they are uploaded first, to each server its part."""
    large = {"w": np.arange(3 << 20, dtype=np.float32).reshape(1 << 10, -1), "b": np.ones(1 << 20, np.float32)}
    net = client.gradient_accumulator(large, name)
    assert net.info().num_shards == SIZE
    pulled = net.push_pull(large, 1, 0)
    for component, values in large.items():
        same(pulled[component], values)
        pulled[component][...] = 0  # it is the caller's own
    same(net.read_average(1)["w"], large["w"])
    net.delete()
    assert client.list_tensors() == []


@pytest.mark.parametrize("way", WAYS)
def test_with_asyncio(servers: list[LocalServer], name: str, way: Any) -> None:
    async def run() -> None:
        async with gradserve.aio.connect(addresses_of(servers), transport=way) as client:
            net = await client.gradient_accumulator(MODEL, name, sharded=True)
            pulls = await asyncio.gather(
                *[net.push_pull(gradient(number), 3, worker_id=str(number)) for number in (1, 2, 6)]
            )
            for pulled in pulls:
                same(pulled["kernel"], gradient(3)["kernel"])
            await net.apply_grad(gradient(2), 1)
            same((await net.take_grad(1, copy=False))["bias"], gradient(2)["bias"])
            same((await net.read_average())["bias"], gradient(2)["bias"])
            assert name in {info.name for info in await client.list_accumulators()}
            assert await net.delete()

    asyncio.run(run())


def test_workers_meet(servers: list[LocalServer], client: gradserve.Client, name: str) -> None:
    """Four workers at a time, for some rounds: all get the same averages."""
    numbers = range(4)
    with ThreadPoolExecutor(len(numbers)) as threads:

        def train(number: int) -> list[float]:
            net = client.gradient_accumulator(MODEL, name, sharded=True)
            return [
                net.push_pull(gradient(number + step), len(numbers), step, worker_id=str(number))["bias"][1].item()
                for step in range(10)
            ]

        assert list(threads.map(train, numbers)) == [[1.5 + step for step in range(10)]] * len(numbers)


def test_a_stale_gradient(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MODEL, name, sharded=True)
    net.push_pull(gradient(4), 1, 0)
    with pytest.raises(gradserve.StaleGradientError) as stale:
        net.push_pull(gradient(9), 1, 0)
    assert stale.value.result is not None
    same(stale.value.result["kernel"], gradient(4)["kernel"])
    returned = net.push_pull(gradient(9), 1, 0, on_stale="return")
    assert (returned.outcome, returned.global_step) == (STALE, 1)
    same(returned["kernel"], gradient(4)["kernel"])
    assert net.apply_grad(gradient(9), 0).outcome is STALE
    same(net.push_pull(gradient(5), 1, 1)["kernel"], gradient(5)["kernel"])


def test_a_stale_gradient_before_any_average(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MODEL, name, sharded=True)
    net.set_global_step(3)
    returned = net.push_pull(gradient(9), 1, 0, on_stale="return")
    assert (returned.outcome, dict(returned), returned.step) == (STALE, {}, 3)


def test_calls_count_once(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MODEL, name, reduction_type="SUM", sharded=True)
    first = [net.apply_grad(gradient(1), 0, worker_id="a", request_id=1 << 40) for _ in range(2)]
    assert [each.duplicate for each in first] == [False, True]
    pulled = [net.push_pull(gradient(2), 2, 0, worker_id="b", request_id=(1 << 40) + 1) for _ in range(2)]
    assert [each.duplicate for each in pulled] == [False, True]
    for each in pulled:
        same(each["kernel"], gradient(3)["kernel"])
    net.apply_grad(gradient(7), 1)
    for _ in range(2):
        same(net.take_grad(1, request_id=(1 << 40) + 2)["kernel"], gradient(7)["kernel"])


def test_a_call_that_gave_up_waits_on(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MODEL, name, sharded=True)
    for limit in growing_limits():
        with pytest.raises(gradserve.DeadlineExceededError) as late:
            net.push_pull(gradient(1), 2, 0, worker_id="a", timeout=limit)
        if net.num_accumulated():
            break
    number = late.value.request_id
    again = net.push_pull(gradient(8), 1, 0, worker_id="a")
    assert again.outcome is Outcome.ALREADY_COUNTED
    same(again["kernel"], gradient(1)["kernel"])
    same(net.push_pull(gradient(1), 2, 0, worker_id="a", request_id=number)["kernel"], gradient(1)["kernel"])


@pytest.mark.parametrize("copy", [True, False])
def test_who_owns_the_arrays(client: gradserve.Client, name: str, *, copy: bool) -> None:
    net = client.gradient_accumulator(MODEL, name, sharded=True)
    pulled = net.push_pull(gradient(2), 1, 0, copy=copy)
    averages = [pulled, net.read_average(copy=copy)]
    for average in averages:
        same(average["kernel"], gradient(2)["kernel"])
        for component in ("kernel", "bias", "scale"):
            assert average[component].flags.writeable is copy
        table: Any = average["table"]
        assert table.values.flags.writeable is copy


@pytest.mark.parametrize("asks", ["push_pull", "apply"])
def test_progress_is_that_of_all_parts(client: gradserve.Client, name: str, asks: str) -> None:
    large: dict[str, Any] = {"w": np.ones((1 << 9, 1 << 9), np.float32), "b": np.ones(1 << 10, np.float64)}
    num_bytes = sum(array.nbytes for array in large.values())
    net = client.gradient_accumulator(large, name)
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    if asks == "push_pull":
        net.push_pull(large, 1, 0, progress=tell)
        expected = 2 * num_bytes
    else:
        net.apply_grad(large, 0, progress=tell)
        expected = num_bytes
        net.take_grad(1, progress=tell)
        assert told.pop() == (num_bytes, num_bytes)
    assert told[0] == (0, num_bytes)
    assert (expected, expected) in told
    if asks == "push_pull":
        assert told == sorted(told)


def test_an_exception_of_the_callback_ends_the_call(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MODEL, name, sharded=True)

    def fails(_done: int, _total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        net.apply_grad(gradient(1), progress=fails)
    assert net.num_accumulated() == 0
    same(net.push_pull(gradient(2), 1)["kernel"], gradient(2)["kernel"])


def test_private_ones_end_with_the_client(servers: list[LocalServer]) -> None:
    with gradserve.connect(addresses_of(servers)) as client:
        nets = [client.gradient_accumulator(MODEL, sharded=True) for _ in range(4)]
        for net in nets:
            assert shards_of(net.name, servers) == [True] * SIZE
            assert net.info().is_private
            same(net.push_pull(gradient(1), 1)["kernel"], gradient(1)["kernel"])
        nets[0].delete()
        assert shards_of(nets[0].name, servers) == [False] * SIZE
    for net in nets:
        assert shards_of(net.name, servers) == [False] * SIZE


def test_lists_have_each_once_and_deletion_by_name_has_all(
    client: gradserve.Client, servers: list[LocalServer], name: str
) -> None:
    names = [name_at(home, SIZE, f"{name}-") for home in range(SIZE)]
    nets = [client.gradient_accumulator(MODEL, each, sharded=True) for each in names]
    whole = client.gradient_accumulator(MODEL, f"{name}-whole")
    assert whole.info().num_shards == 0
    for net in nets:
        net.apply_grad(gradient(1))
    listed = {info.name: info for info in client.list_accumulators() if info.name.startswith(name)}
    assert list(listed) == sorted([*names, whole.name])
    assert [listed[net.name] for net in nets] == [net.info() for net in nets]
    assert [listed[net.name].num_accumulated for net in nets] == [1] * SIZE
    assert [client.delete_accumulator(each) for each in names] == [True] * SIZE
    assert client.delete_accumulator(names[0]) is False
    for each in names:
        assert shards_of(each, servers) == [False] * SIZE
    assert client.delete_accumulator(whole.name)
