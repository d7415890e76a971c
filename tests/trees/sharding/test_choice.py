"""Which accumulators an aggregator shards over the servers upstream: those that their own clients would shard."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
from gradserve import DenseSpec, SparseSpec
from gradserve_protocol.placement import home_of
from gradserve_protocol.v1 import parameters_messages_pb2, parameters_pb2
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import shards_of
from tests.servers.raw_calls import RawCalls
from tests.trees.servers import aggregator, running_tree
from tests.trees.workers import at_once, clients_of

MIB = {"w": DenseSpec("float32", (1 << 18,))}
LESS = {"w": DenseSpec("float32", ((1 << 18) - 1,))}
OPEN = {"w": DenseSpec("float32", (None, 4))}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(2) as servers:
        yield servers


@pytest.fixture(scope="module")
def near(servers: list[LocalServer]) -> Iterator[LocalServer]:
    with aggregator(",".join(addresses_of(servers)), 2) as running:
        yield running


@pytest.fixture(scope="module")
def worker(near: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(near.address) as client:
        yield client


@pytest.fixture(scope="module")
def direct(servers: list[LocalServer]) -> Iterator[gradserve.Client]:
    with gradserve.connect(addresses_of(servers)) as client:
        yield client


@pytest.mark.parametrize(
    ("components", "options", "num_shards"),
    [
        (MIB, {}, 2),
        (MIB, {"device": "cpu"}, 2),
        (MIB, {"device": "auto"}, 0),
        (MIB, {"sharded": False}, 0),
        (LESS, {}, 0),
        (LESS, {"sharded": True}, 2),
        (OPEN, {}, 0),
        (MIB | {"t": SparseSpec("float32", (None, 4))}, {}, 2),
    ],
)
def test_the_rule_is_that_of_clients(
    servers: list[LocalServer],
    worker: gradserve.Client,
    direct: gradserve.Client,
    name: str,
    components: Any,
    options: dict[str, Any],
    num_shards: int,
) -> None:
    """So clients of the servers find what the worker has made, with the same plan."""
    made = worker.gradient_accumulator(components, name, **options)
    assert made.info().num_shards == num_shards
    assert direct.gradient_accumulator(components, name, **options).info() == made.info()
    assert sum(shards_of(name, servers)) == max(num_shards, 1)


def test_accumulators_of_one_tensor_are_whole(worker: gradserve.Client, direct: gradserve.Client, name: str) -> None:
    """As they are for clients of the servers."""
    made = worker.conditional_accumulator("float32", (1 << 18,), shared_name=name)
    assert made.info().num_shards == 0
    assert direct.conditional_accumulator("float32", (1 << 18,), shared_name=name).info() == made.info()


@pytest.mark.parametrize(
    ("components", "options", "why"),
    [
        (MIB, {"device": "auto"}, "sums that are sharded are on 'cpu', and the device is 'auto'"),
        (OPEN, {}, r"its shapes have to be known, and component 'w' is w float32 \(\?, 4\)"),
        (MIB, {"shared_name": None}, "the client has one server, .* or the accumulator is private to the client"),
    ],
)
def test_what_cannot_be_sharded(
    worker: gradserve.Client, name: str, components: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(
        gradserve.InvalidArgumentError, match=f"^expected sharded=False or None, got True: {why}"
    ) as refused:
        worker.gradient_accumulator(components, **{"shared_name": name, "sharded": True, **options})
    assert refused.value.field == "sharded"
    assert name not in {each.name for each in worker.list_accumulators()}


def test_one_server_upstream(name: str) -> None:
    with running_tree(2) as (_, near), gradserve.connect(near.address) as worker:
        assert worker.gradient_accumulator(MIB, name).info().num_shards == 0
        with pytest.raises(gradserve.InvalidArgumentError, match="is no aggregator of several") as refused:
            worker.gradient_accumulator(MIB, f"{name}-2", sharded=True)
        assert refused.value.field == "sharded"


@pytest.mark.parametrize(
    ("first", "then", "difference"),
    [(True, False, "num_shards is 2, not 0"), (False, None, "num_shards is 0, not 2"), (None, False, "num_shards")],
)
@pytest.mark.parametrize("who", ["worker", "direct"])
def test_all_have_to_agree(
    worker: gradserve.Client,
    direct: gradserve.Client,
    name: str,
    who: str,
    first: bool | None,
    then: bool | None,
    difference: str,
) -> None:
    makers = [worker, direct] if who == "worker" else [direct, worker]
    makers[0].gradient_accumulator(MIB, name, sharded=first)
    for each in makers:
        with pytest.raises(gradserve.AlreadyExistsError, match=difference):
            each.gradient_accumulator(MIB, name, sharded=then)


def test_who_deletes_it_deletes_all_of_it(
    servers: list[LocalServer], worker: gradserve.Client, direct: gradserve.Client, name: str
) -> None:
    earlier = worker.gradient_accumulator(MIB, name)
    assert direct.delete_accumulator(name)
    later = worker.gradient_accumulator(MIB, name)
    with pytest.raises(gradserve.NotFoundError):
        earlier.info()
    assert not earlier.delete(), "another one has its name now"
    assert shards_of(name, servers) == [True, True]
    assert later.delete()
    assert shards_of(name, servers) == [False, False]
    worker.gradient_accumulator(MIB, name)
    assert worker.delete_accumulator(name)
    assert not worker.delete_accumulator(name)
    assert shards_of(name, servers) == [False, False]


def test_what_is_known_of_it(worker: gradserve.Client, direct: gradserve.Client, name: str) -> None:
    """The memory is that on all servers."""
    made = worker.gradient_accumulator(MIB, name)
    ones = np.ones(1 << 18, np.float32)
    at_once(lambda worker_id: made.apply_grad({"w": ones}, worker_id=worker_id), "ab")
    assert made.info().num_bytes == 1 << 20, "of the sum"
    assert made.info() == direct.gradient_accumulator(MIB, name).info()
    assert worker.list_accumulators() == direct.list_accumulators()


def test_parameters_are_sharded_if_a_worker_wants_it(
    worker: gradserve.Client, direct: gradserve.Client, name: str
) -> None:
    """Whichever client has created them, all others find them."""
    values = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2)}
    makers = {"here": (worker, direct), "there": (direct, worker)}
    for where, (creator, other) in makers.items():
        full_name = f"{name}-{where}"
        creator.parameters(values, full_name, sharded=True)
        found = [worker.parameters(shared_name=full_name), other.parameters(values, full_name, sharded=True)]
        for each in (*found, direct.parameters(shared_name=full_name)):
            np.testing.assert_array_equal(each.read()["w"], values["w"])
        assert direct.parameters(shared_name=full_name).info().num_shards == 2
        assert found[0].info().num_shards == 0, "to workers, they are on the aggregator"
        (here,), (there,) = [
            [each for each in client.list_parameters() if each.name == full_name] for client in (worker, direct)
        ]
        assert (here.num_shards, here.num_bytes, here.digest) == (0, there.num_bytes, "")
        for client in (worker, direct):
            with pytest.raises(gradserve.AlreadyExistsError, match="num_shards is 2, not 0"):
                client.parameters(values, full_name)
        assert found[0].delete()
        with pytest.raises(gradserve.NotFoundError):
            direct.parameters(shared_name=full_name)


def test_workers_that_create_sharded_parameters_at_once_send_values_once(near: LocalServer, name: str) -> None:
    with clients_of(near.address, 4) as clients:
        made = at_once(
            lambda client, number: client.parameters({"w": np.full((4, 2), number)}, name, sharded=True),
            clients,
            (1.0, 2.0, 3.0, 4.0),
        )
        (value,) = {each.read()["w"].tobytes() for each in made}
        assert np.frombuffer(value).tolist() in [[number] * 8 for number in (1.0, 2.0, 3.0, 4.0)]


def test_parameters_that_cannot_be_sharded(worker: gradserve.Client, near: LocalServer, name: str) -> None:
    values = {"w": np.zeros((3, 2), np.float32)}
    with (
        running_tree(1) as (top, alone),
        clients_of(alone.address, 1) as (other,),
        clients_of(top.address, 1) as (one,),
    ):
        calls: dict[str, Callable[[], object]] = {
            "they are private": lambda: worker.parameters(values, sharded=True),
            "one server upstream": lambda: other.parameters(values, name, sharded=True),
            "one server": lambda: one.parameters(values, name, sharded=True),
        }
        for call in calls.values():
            with pytest.raises(gradserve.InvalidArgumentError, match=r"^expected sharded=False, got True: ") as error:
                call()
            assert error.value.field == "sharded"
    with RawCalls(near.address) as raw:
        spec = parameters_pb2.ParametersSpec(num_shards=2)
        request = parameters_messages_pb2.CreateParametersRequest(
            parameters=parameters_pb2.ParametersRef(name=name), spec=spec
        )
        failure = raw.fail("CreateParameters", request)
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "spec.num_shards")
        for method in ("StageUpdate", "CountUpdates", "ForgetUpdates"):
            kind: Any = getattr(parameters_messages_pb2, f"{method}Request")
            assert "this server is an aggregator" in raw.fail(method, kind()).message


def test_an_aggregator_of_fewer_servers_cannot_forward(
    servers: list[LocalServer], direct: gradserve.Client, name: str
) -> None:
    home = home_of("", name, 2)
    direct.parameters({"w": np.zeros((3, 2), np.float32)}, name, sharded=True)
    with (
        aggregator(servers[home].address, 2) as near,
        clients_of(near.address, 1) as (client,),
        pytest.raises(gradserve.InvalidArgumentError, match="are sharded over 2 servers, and 1 are upstream") as error,
    ):
        client.parameters(shared_name=name)
    assert error.value.field == "shared_name"
