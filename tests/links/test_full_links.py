"""A link that gradients fill: they arrive, and nothing that shares the link with them fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gradserve.aio
from benchmarks.harness.links.spec import LinkSpec
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


async def check_health(address: str, ended: asyncio.Event) -> int:
    """Checks the health over a connection of its own to the end; returns how often."""
    count = 0
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while not ended.is_set():
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            count += 1
            await asyncio.sleep(_CHECK_PAUSE_SECONDS)
    return count


@pytest.mark.timing  # leases of a second are renewed while a link is full
@pytest.mark.parametrize(
    ("load", "way"),
    # gRPC's way is as it was, so one link is enough for it.
    [(load, way) for load in LOADS for way in (WAYS if load is LOADS[0] else ("bulk",))],
    ids=lambda value: value.link.name if isinstance(value, Load) else value,
)
async def test_nothing_fails_while_a_link_is_full(load: Load, way: Transport) -> None:
    with serving_behind(load.link) as address:
        async with connected(address, way) as quiet, connected(address, way) as other:
            leased = await quiet.conditional_accumulator("float32", ())
            awaited = await other.conditional_accumulator("float32", (), shared_name="awaited")
            waiting = asyncio.create_task(awaited.take_grad(1, timeout=_LOAD_SECONDS))
            await eventually_async(awaited.info, lambda info: info.num_waiting == 1)
            ended = asyncio.Event()
            async with asyncio.timeout(_LOAD_SECONDS), asyncio.TaskGroup() as tasks:
                checks = tasks.create_task(check_health(address, ended))
                workers = [tasks.create_task(work(address, way, rank, load)) for rank in range(_NUM_WORKERS)]
                await asyncio.gather(*workers)
                ended.set()
            assert checks.result() > 0
            assert not waiting.done()
            await awaited.apply_grad(3.0)
            assert await waiting == 3.0
            # Its lease is shorter than the load: without signs of life from its client, it would be gone.
            await leased.apply_grad(4.0)
            assert await leased.take_grad(1) == 4.0
            assert (await quiet.server_info()).transport.way == way
