"""A call that failed leaves nothing to the garbage collector: its arrays are free at once, on both sides."""

import asyncio
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.transport.driving import Group, Schedule
from tests.client.test_tracebacks import CALLS as SMALL_CALLS
from tests.client.test_tracebacks import Call
from tests.cluster.servers import addresses_of, running_cluster
from tests.servers.polling import eventually_async

LARGE = (600, 1000)
CALLS: dict[str, Call] = {
    **SMALL_CALLS,
    "large, refused by the server": lambda _client, acc, _layer: acc.apply_grad(np.zeros(LARGE, np.float32)),
    "large, of an op": lambda client, _acc, _layer: client.raw_ops.GRUBlockCell(
        x=np.zeros(LARGE, np.float32), h_prev=np.zeros((2, 3)), w_ru=[], w_c=[], b_ru=[], b_c=[]
    ),
}


@pytest.fixture
def left_in_cycles() -> Iterator[Callable[[], list[str]]]:
    """Where errors were raised that are found in garbage."""

    def found() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        garbage, errors = list(gc.garbage), []
        gc.garbage.clear()
        for each in garbage:
            if isinstance(each, BaseException) and each.__traceback__:
                errors += traceback.format_tb(each.__traceback__)[-1:]
        return errors

    gc.collect()
    gc.freeze()  # for good: the many objects of a test run would be looked at again before each test
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_a_call(client: gradserve.Client, call: Call, left_in_cycles: Callable[[], list[str]]) -> None:
    accumulator, layer = client.conditional_accumulator("float32", (2,)), client.batch_norm()
    with pytest.raises(gradserve.GradserveError):
        call(client, accumulator, layer)
    client.server_info()  # the server has done with the call before
    assert left_in_cycles() == []


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
async def test_a_call_aio(server_address: str, call: Call, left_in_cycles: Callable[[], list[str]]) -> None:
    async with gradserve.aio.connect(server_address) as client:
        accumulator, layer = await client.conditional_accumulator("float32", (2,)), await client.batch_norm()
        with pytest.raises(gradserve.GradserveError):
            await call(client, accumulator, layer)
        await client.server_info()
        assert left_in_cycles() == []


def refuse(num_done: int, _num_bytes: int) -> None:
    if num_done:
        raise ValueError


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shared_memory"])
def test_a_callback_that_raises(
    server_address: str, transport: Any, left_in_cycles: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.transport.progress.INTERVAL_SECONDS", 0)
    with gradserve.connect(server_address, transport=transport) as client:
        with pytest.raises(ValueError, match="^$"):
            client.put(np.zeros((4, *LARGE)), progress=refuse)
        client.server_info()
        assert left_in_cycles() == []


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shared_memory"])
async def test_a_callback_that_raises_aio(
    server_address: str, transport: Any, left_in_cycles: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.transport.progress.INTERVAL_SECONDS", 0)
    async with gradserve.aio.connect(server_address, transport=transport) as client:
        with pytest.raises(ValueError, match="^$"):
            await client.put(np.zeros((4, *LARGE)), progress=refuse)
        await client.server_info()
        assert left_in_cycles() == []


async def test_a_call_that_is_given_up(server_address: str, left_in_cycles: Callable[[], list[str]]) -> None:
    async with gradserve.aio.connect(server_address) as client:
        accumulator = await client.gradient_accumulator({"w": np.zeros(LARGE, np.float32)})
        call = asyncio.create_task(accumulator.push_pull({"w": np.zeros(LARGE, np.float32)}, num_required=2))
        await eventually_async(accumulator.num_accumulated)
        call.cancel()
        await asyncio.wait([call])
        del call
        await client.server_info()
        assert left_in_cycles() == []


@pytest.mark.parametrize("transport", ["bulk", "shared_memory"])
def test_calls_that_run_together(transport: Any) -> None:
    """Their arrays are free at once, too: a cycle would keep the gradients and averages of several rounds."""
    gradient = {name: np.zeros(LARGE, np.float32) for name in "ab"}
    with running_cluster(2) as servers, gradserve.connect(addresses_of(servers), transport=transport) as client:
        accumulator = client.gradient_accumulator(gradient, sharded=True)
        accumulator.push_pull(gradient, 1)
        gc.collect()
        gc.disable()
        try:
            gone = weakref.ref(accumulator.push_pull(gradient, 1, 1)["a"])
            assert gone() is None
            assert not [each for each in gc.get_objects() if isinstance(each, Schedule | Group)]
        finally:
            gc.enable()


@pytest.mark.parametrize("idle_lease", [None, 60])
async def test_calls_that_run_together_and_fail(
    idle_lease: float | None, left_in_cycles: Callable[[], list[str]]
) -> None:
    gradient = {name: np.zeros(LARGE, np.float32) for name in "ab"}
    with running_cluster(2) as servers:
        async with gradserve.aio.connect(addresses_of(servers)) as client:
            accumulator = await client.gradient_accumulator(gradient, sharded=True, idle_lease=idle_lease)
            with pytest.raises(gradserve.InvalidArgumentError):
                await accumulator.push_pull({"a": gradient["a"], "b": gradient["b"][0]}, 1)
            with pytest.raises(gradserve.DeadlineExceededError):
                await accumulator.push_pull(gradient, 2, timeout=0.01)
            with pytest.raises(gradserve.DeadlineExceededError):
                await accumulator.take_grad(2, timeout=0.01)
            await client.server_info()
            assert left_in_cycles() == []
