"""When an accumulator is sharded, and what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import DenseSpec, SparseSpec
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster

MIB = {"w": DenseSpec("float32", (1 << 18,))}
LESS = {"w": DenseSpec("float32", ((1 << 18) - 1,))}
UNKNOWN_ROWS = MIB | {"t": SparseSpec("float32", (None, 4))}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(2) as servers:
        yield servers


@pytest.fixture(scope="module")
def client(servers: list[LocalServer]) -> Iterator[gradserve.Client]:
    with gradserve.connect(addresses_of(servers)) as connected:
        yield connected


@pytest.mark.parametrize(
    ("components", "options", "num_shards"),
    [
        (MIB, {}, 2),
        (MIB, {"sharded": None, "device": "cpu"}, 2),
        (MIB, {"sharded": False}, 0),
        (MIB, {"device": "auto"}, 0),
        (LESS, {}, 0),
        (LESS, {"sharded": True}, 2),
        (UNKNOWN_ROWS, {}, 2),
        (MIB | {"u": DenseSpec("float32", (None, 4))}, {}, 0),
        (MIB | {"u": DenseSpec("float32")}, {}, 0),
        (MIB | {"t": SparseSpec("float32", (4, None))}, {}, 0),
        (MIB | {"t": SparseSpec("float32")}, {}, 0),
        ({"t": SparseSpec("float32", (1 << 20, 4))}, {}, 0),
        ({"t": SparseSpec("float32", (1 << 20, 4))}, {"sharded": True}, 2),
    ],
)
def test_which_are_sharded(
    client: gradserve.Client, name: str, components: Any, options: dict[str, Any], num_shards: int
) -> None:
    assert client.gradient_accumulator(components, name, **options).info().num_shards == num_shards


@pytest.mark.parametrize(
    ("components", "options", "why"),
    [
        (MIB, {"device": "auto"}, "sums that are sharded are on 'cpu', and the device is 'auto'"),
        (
            {"u": DenseSpec("float32", (None, 4))},
            {},
            r"its shapes have to be known, and component 'u' is u float32 \(\?, 4\)",
        ),
        ({"u": DenseSpec("float32")}, {}, "its shapes have to be known, and component 'u' is u float32 of any shape"),
        (
            {"t": SparseSpec("float32", (4, None))},
            {},
            r"its shapes, but for the first size, have to be known, and component 't' is t sparse float32 \(4, \?\)",
        ),
    ],
)
def test_what_cannot_be_sharded(
    client: gradserve.Client, name: str, components: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(
        gradserve.InvalidArgumentError, match=rf"^expected sharded=False or None, got True: {why} \[GS_\w+\]$"
    ) as no:
        client.gradient_accumulator(components, name, sharded=True, **options)
    assert no.value.field == "sharded"


@pytest.mark.parametrize("sharded", [None, False])
def test_a_client_of_one_server(server_address: str, name: str, *, sharded: bool | None) -> None:
    with gradserve.connect(server_address) as one:
        assert one.gradient_accumulator(MIB, name, sharded=sharded).info().num_shards == 0
        with pytest.raises(gradserve.InvalidArgumentError, match="the client has one server"):
            one.gradient_accumulator(MIB, name, sharded=True)


@pytest.mark.parametrize("sharded", [2, "yes", np.ones(2)])
def test_what_is_no_flag(client: gradserve.Client, sharded: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="sharded"):
        client.gradient_accumulator(MIB, sharded=sharded)


def test_all_have_to_agree(client: gradserve.Client, name: str) -> None:
    client.gradient_accumulator(MIB, name)
    with pytest.raises(gradserve.AlreadyExistsError, match="num_shards"):
        client.gradient_accumulator(MIB, name, sharded=False)
    with pytest.raises(gradserve.AlreadyExistsError):
        client.gradient_accumulator(LESS, name, sharded=True)
    assert client.gradient_accumulator(MIB, name, sharded=True).info().num_shards == 2


def test_a_client_with_other_servers(servers: list[LocalServer], client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MIB, name)
    home = next(address for address in addresses_of(servers) if _num_accumulated(address, name) is not None)
    with gradserve.connect(home) as one, pytest.raises(gradserve.GradserveError):
        one.gradient_accumulator(MIB, name)
    with gradserve.connect(addresses_of(servers)[::-1]) as turned, pytest.raises(gradserve.InvalidArgumentError):
        turned.gradient_accumulator(MIB, name)
    assert net.num_accumulated() == 0


def _num_accumulated(address: str, name: str) -> int | None:
    with gradserve.connect(address) as client:
        return next((info.num_accumulated for info in client.list_accumulators() if info.name == name), None)


def test_a_handle_of_a_tensor(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MIB, name)
    handle = client.put(np.ones(1 << 18, np.float32))
    with pytest.raises(gradserve.InvalidArgumentError, match="got the handle of a tensor.* is sharded over several"):
        net.apply_grad({"w": handle})
    client.delete(handle)


@pytest.mark.parametrize(
    ("gradient", "message", "field"),
    [
        (
            {"w": np.ones(5), "b": np.ones(3)},
            r"Shape mismatch: expected \[262144\], got \[5\]",
            "gradient[0].dense.shape",
        ),
        (
            {"w": np.ones(1 << 18), "b": np.ones(4)},
            r"Shape mismatch: expected \[3\], got \[4\]",
            "gradient[1].dense.shape",
        ),
        (
            {"w": np.ones(1 << 18), "b": [1, np.nan, 1]},
            r"expected finite values.* got nan at \[1\]",
            "gradient[1].dense",
        ),
    ],
)
def test_bad_gradients(client: gradserve.Client, name: str, gradient: Any, message: str, field: str) -> None:
    components = MIB | {"b": DenseSpec("float32", (3,))}
    net = client.gradient_accumulator(components, name, refuse_non_finite=True)
    with pytest.raises(gradserve.InvalidArgumentError, match=message) as refused:
        net.apply_grad(gradient)
    assert refused.value.field == field
    assert refused.value.request_id is not None
    assert net.num_accumulated() == 0


def test_a_bad_value_of_a_divided_component(client: gradserve.Client, name: str) -> None:
    net = client.gradient_accumulator(MIB, name, refuse_non_finite=True)
    values = np.ones(1 << 18, np.float32)
    for place in (5, (1 << 17) + 7):
        bad = values.copy()
        bad[place] = np.inf
        with pytest.raises(gradserve.InvalidArgumentError, match="got inf"):
            net.apply_grad({"w": bad})
    assert net.num_accumulated() == 0
