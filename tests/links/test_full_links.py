"""A link that gradients or DiLoCo's updates fill: they arrive, and nothing that shares the link with them fails."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gradserve.aio
from benchmarks.harness.links.spec import LinkSpec
from gradserve import optim
from gradserve.training.diloco.plan import Plan
from gradserve.training.diloco.worker import begin_diloco
from gradserve.transport.settings import Transport
from tests.links.serving import serving_behind
from tests.servers.connecting import connect_with_aio, without_retries
from tests.servers.polling import PATIENCE_SECONDS, eventually_async

_NUM_WORKERS = 2
_CHECK_PAUSE_SECONDS = 0.05
_LOAD_SECONDS = 3 * PATIENCE_SECONDS


@dataclass(frozen=True)
class Load:
    """Rounds that fill a link for a few seconds."""

    link: LinkSpec
    num_floats: int
    num_rounds: int


LOADS = [
    Load(LinkSpec(10), 250_000, 3),
    Load(LinkSpec(200, 0.08), 2_500_000, 3),
    Load(LinkSpec(1000, 0.02), 6_000_000, 4),
]


WAYS = [Transport.GRPC, Transport.BULK]


@contextlib.asynccontextmanager
async def connected(address: str, way: Transport) -> AsyncIterator[gradserve.aio.Client]:
    """A client that does not try again: a connection that is lost fails the call that uses it."""
    async with connect_with_aio(address, without_retries(PATIENCE_SECONDS, way)) as client:
        yield client


async def work(address: str, way: Transport, rank: int, load: Load) -> None:
    """Applies gradients whose average each worker knows; worker 0 takes it."""
    async with connected(address, way) as client:
        acc = await client.conditional_accumulator("float32", (load.num_floats,), shared_name="loaded")
        ramp = np.arange(load.num_floats, dtype=np.float32) % 1000
        for step in range(load.num_rounds):
            await acc.apply_grad(ramp + np.float32(2 * rank + step), local_step=step)
            if rank == 0:
                average = await acc.take_grad(_NUM_WORKERS, timeout=PATIENCE_SECONDS)
                assert np.array_equal(average, ramp + np.float32(_NUM_WORKERS - 1 + step))
            else:
                await eventually_async(acc.info, partial(_is_later, step))


def _is_later(step: int, info: gradserve.AccumulatorInfo) -> bool:
    return info.global_step > step


async def check_health(address: str, ended: asyncio.Event, is_full: Callable[[], bool] = lambda: True) -> int:
    """Checks the health over a connection of its own to the end; returns how often while the link was full."""
    count = 0
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while not ended.is_set():
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            count += is_full()
            await asyncio.sleep(_CHECK_PAUSE_SECONDS)
    return count


@contextlib.asynccontextmanager
async def others_at_work(
    address: str, way: Transport, is_full: Callable[[], bool] = lambda: True
) -> AsyncIterator[None]:
    """Has a client with a lease, a call that waits and checks of the health beside a load; checks them after it."""
    async with connected(address, way) as quiet, connected(address, way) as other:
        leased = await quiet.conditional_accumulator("float32", ())
        awaited = await other.conditional_accumulator("float32", (), shared_name="awaited")
        waiting = asyncio.create_task(awaited.take_grad(1, timeout=_LOAD_SECONDS))
        await eventually_async(awaited.info, lambda info: info.num_waiting == 1)
        ended = asyncio.Event()
        async with asyncio.timeout(_LOAD_SECONDS), asyncio.TaskGroup() as tasks:
            checks = tasks.create_task(check_health(address, ended, is_full))
            yield
            ended.set()
        assert checks.result() > 0
        assert not waiting.done()
        await awaited.apply_grad(3.0)
        assert await waiting == 3.0
        # Its lease is shorter than the load: without signs of life from its client, it would be gone.
        await leased.apply_grad(4.0)
        assert await leased.take_grad(1) == 4.0
        assert (await quiet.server_info()).transport.way == way


@pytest.mark.timing  # leases of a second are renewed while a link is full
@pytest.mark.parametrize(
    ("load", "way"),
    # gRPC's way is as it was, so one link is enough for it.
    [(load, way) for load in LOADS for way in (WAYS if load is LOADS[0] else ("bulk",))],
    ids=lambda value: value.link.name if isinstance(value, Load) else value,
)
async def test_nothing_fails_while_a_link_is_full(load: Load, way: Transport) -> None:
    with serving_behind(load.link) as address:
        async with others_at_work(address, way):
            await asyncio.gather(*[work(address, way, rank, load) for rank in range(_NUM_WORKERS)])


# DiLoCo


PLAN = Plan(sync_every=8, num_fragments=2, delay=6, weight="equal", codec="e3m0", codec_down="int8")
ROUNDS, FLOATS = 3, 125_000
"""The rounds of each fragment, and its size: each worker sends 64 kB and receives 127 kB for it."""
STEP_SECONDS = 0.02
"""Much less than the link takes for a fragment."""


class InFlight(gradserve.Interceptor):
    """Counts the synchronizations that are under way, and fails when one needs another attempt.

    Attributes:
        count: Their number.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def around_call(self, call: gradserve.CallInfo) -> gradserve.Around:
        is_counted = call.method.endswith("/PushPullParameters")
        self._add(is_counted)
        answer = yield None
        self._add(-is_counted)
        assert answer.attempts == 1

    def _add(self, number: int) -> None:
        with self._lock:
            self.count += number


def train(address: str, rank: int, in_flight: InFlight) -> tuple[list[int], int]:
    """Trains by inner steps that add rank + 1; returns the synchronizations in flight at each, and the failed ones."""
    found = []
    with (
        gradserve.connect(address, timeout=PATIENCE_SECONDS, transport="bulk", interceptors=[in_flight]) as client,
        contextlib.closing(
            begin_diloco(
                client,
                [{name: np.zeros(FLOATS, np.float32)} for name in ("first", "second")],
                plan=PLAN,
                name="diloco",
                num_required=_NUM_WORKERS,
                outer_optimizer=optim.SGD(1.0),
                to_framework=np.asarray,
                worker_id=str(rank),
                timeout=None,
                container="",
                if_exists="join",
            )
        ) as worker,
    ):
        values = worker.values()

        def local(names: Collection[str]) -> dict[str, Any]:
            return {name: values[name] for name in names}

        for _ in range(ROUNDS * PLAN.sync_every):
            values = {name: each + np.float32(rank + 1) for name, each in values.items()}
            time.sleep(STEP_SECONDS)
            found.append(in_flight.count)
            values |= worker.take_step(local)
        worker.finish(local)
        return found, worker.num_failed


@pytest.mark.timing  # as above
async def test_nothing_fails_while_diloco_fills_a_long_link() -> None:
    in_flight = [InFlight() for _ in range(_NUM_WORKERS)]
    with serving_behind(LinkSpec(10, 0.08)) as address:
        async with others_at_work(address, Transport.BULK, lambda: any(each.count for each in in_flight)):
            found = await asyncio.gather(
                *[asyncio.to_thread(train, address, rank, each) for rank, each in enumerate(in_flight)]
            )
        for counts, num_failed in found:
            assert num_failed == 0
            assert set(counts) == {0, 1, 2}, "inner steps go on beside synchronizations of none to both fragments"
        async with connected(address, Transport.BULK) as client:
            # An update has the steps since its fragment was loaded: of the first round, 2 or 6; of later ones, 2.
            for name, steps in {"diloco": 2 + 2 * (ROUNDS - 1), "diloco/1": 6 + 2 * (ROUNDS - 1)}.items():
                version = await (await client.parameters(shared_name=name)).read(codec="int8")
                assert (version.step, version.num_updates) == (ROUNDS, _NUM_WORKERS)
                (values,) = version.values.values()
                np.testing.assert_allclose(values, 1.5 * steps, rtol=1e-6)
