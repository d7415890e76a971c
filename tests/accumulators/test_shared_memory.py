"""Gradients and averages in memory that a client and a server on the same machine share."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
import gradserve.aio
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import ended

N = 1 << 18
Way: TypeAlias = Literal["shared_memory", "bulk", "grpc"]
WAYS: tuple[Way, ...] = get_args(Way)


@pytest.fixture
def local() -> Iterator[LocalServer]:
    """A server of one test, which looks at its memory."""
    with LocalServer() as local:
        yield local


def used(server: Server) -> tuple[int, int, int]:
    context = server.sockets.context
    return server.usage.memory.used, context.in_flight.used, context.fair.region_bytes.used


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copy", [True, False])
def test_rounds_are_the_same_on_every_way(server_address: str, way: Way, copy: bool) -> None:
    generator = np.random.default_rng(0)
    with gradserve.connect(server_address, transport=way, timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(N,))
        mine = client.empty(N, "float32")
        for step in range(3):
            other = generator.normal(size=N).astype(np.float32)
            mine[:] = generator.normal(size=N)
            expected = (mine + other) / np.float32(2)
            acc.apply_grad(mine, local_step=step)
            acc.apply_grad(other, local_step=step)
            mine[:] = np.nan
            average = acc.take_grad(2, copy=copy)
            np.testing.assert_array_equal(average, expected)
            assert average.flags.writeable is copy
            np.testing.assert_array_equal(acc.read_average(step + 1, copy=copy), expected)


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_is_read_in_place_with_asyncio(server_address: str, way: Way) -> None:
    async with gradserve.aio.connect(server_address, transport=way, timeout=PATIENCE_SECONDS) as client:
        model = {"w": np.zeros((300, 200), np.float32), "b": np.zeros(7, np.float64)}
        acc = await client.gradient_accumulator(model)
        weights = await client.empty((300, 200), "float32")
        weights[:] = 3
        result = await acc.push_pull({"w": weights, "b": np.arange(7.0)}, 1, copy=False)
        np.testing.assert_array_equal(result["w"], weights)
        np.testing.assert_array_equal(result["b"], np.arange(7.0))
        assert not any(value.flags.writeable for value in result.values())


def test_an_average_that_is_read_in_place_stays_what_it_is(server_address: str) -> None:
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(N,))
        kept = []
        for step in range(6):
            acc.apply_grad(np.full(N, step, np.float32), local_step=step)
            average = acc.take_grad(1, copy=False)
            if step % 2:
                kept.append((step, average[N // 2 :]))
        for step, average in kept:
            assert (average == step).all()


def test_what_was_read_in_place_outlives_the_client(server_address: str) -> None:
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        name = "outlives the client"
        acc = client.conditional_accumulator("float32", shape=(N,), shared_name=name)
        acc.apply_grad(np.ones(N, np.float32))
        average = acc.take_grad(1, copy=False)
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(N,), shared_name=name)
        for step in range(1, 6):
            acc.apply_grad(np.full(N, 9, np.float32), local_step=step)
            acc.take_grad(1)
        acc.delete()
    assert (average == 1).all()


def test_memory_that_is_dropped_on_either_side_is_freed_on_the_other(local: LocalServer) -> None:
    with gradserve.connect(local.address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(N,))
        for step in range(8):
            mine = client.empty(N, "float32")
            mine[:] = step
            acc.apply_grad(mine, local_step=step)
            assert acc.take_grad(1)[0] == step
            del mine
            gc.collect()
        memory, in_flight, regions = local.inspect(used)
        assert (memory, in_flight) == (N * 4, 0), "one average is kept"
        assert 0 < regions <= 2 * N * 4, "the same memory was used again"
    eventually(lambda: local.inspect(used), lambda seen: seen == (0, 0, 0))


def test_beyond_the_limit_of_shared_memory_gradients_are_sent() -> None:
    limits = LimitsConfig(max_region_bytes=ByteSize(N * 4 * 2))
    with (
        LocalServer(ServerConfig(limits=limits)) as local,
        gradserve.connect(local.address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client,
    ):
        acc = client.conditional_accumulator("float32", shape=(N,))
        arrays = [client.empty(N, "float32") for _ in range(4)]
        for index, array in enumerate(arrays):
            array[:] = index
            acc.apply_grad(array)
        assert (acc.take_grad(4) == 1.5).all()
        assert local.inspect(used)[2] <= N * 4 * 2


def test_a_gradient_need_not_begin_where_its_memory_begins(server_address: str) -> None:
    with gradserve.connect(server_address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32")
        memory = client.empty(2 * N, "float32")
        memory[:] = np.arange(2 * N)
        for view in (memory[16 : 16 + N], memory[1 : 1 + N], memory[::2]):
            acc.apply_grad(view)
        expected = (memory[16 : 16 + N] + memory[1 : 1 + N] + memory[::2]) / np.float32(3)
        np.testing.assert_array_equal(acc.take_grad(3), expected)


_READER = """
import sys, numpy as np, gradserve
client = gradserve.connect(sys.argv[1], transport="shared_memory")
acc = client.conditional_accumulator("float32", shape=(1 << 18,), shared_name=sys.argv[2])
mine = client.empty(1 << 18, "float32"); mine[:] = 1
acc.apply_grad(mine)
average = acc.take_grad(1, copy=False)
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_leaves_nothing(local: LocalServer, name: str) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, local.address, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ended(reader):
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
    eventually(lambda: local.inspect(used), lambda seen: seen == (N * 4, 0, 0))
    with gradserve.connect(local.address, transport="shared_memory", timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(N,), shared_name=name)
        assert (acc.read_average(copy=False) == 1).all()
        for step in range(1, 4):
            acc.apply_grad(np.full(N, step, np.float32), local_step=step)
            assert (acc.take_grad(1, copy=False) == step).all()
        acc.delete()
    eventually(lambda: local.inspect(used), lambda seen: seen == (0, 0, 0))
