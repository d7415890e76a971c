"""Clients that are closed: what is under way, what comes later, and what they had for themselves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Exchange, Pause, TimeLimits, Unary
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from tests.client.every_call import CALLS, failure_of, failure_of_aio, make_things, make_things_aio
from tests.client.fake_transport import FakeTransport
from tests.servers.connecting import client_over
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async

KINDS = ["conditional_accumulator", "sparse_conditional_accumulator", "gradient_accumulator"]


def test_calls_after_close(server_address: str) -> None:
    client = gradserve.connect(server_address)
    made = make_things(client)
    client.close()
    client.close()
    for name, call in CALLS.items():
        failure = failure_of(partial(call, client, made))
        assert type(failure) is gradserve.CallCancelledError, name
        assert "closed" in str(failure)


async def test_calls_after_close_aio(server_address: str) -> None:
    client = gradserve.aio.connect(server_address)
    made = await make_things_aio(client)
    await client.close()
    await client.close()
    for name, call in CALLS.items():
        failure = await failure_of_aio(call(client, made))
        assert type(failure) is gradserve.CallCancelledError, name
        assert "closed" in str(failure)


def test_close_cancels_calls_under_way(client: gradserve.Client, server_address: str, name: str) -> None:
    acc = client.conditional_accumulator("float32", (), name)
    closing = gradserve.connect(server_address)
    take = closing.conditional_accumulator("float32", (), name).take_grad
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(take, 1, timeout=PATIENCE_SECONDS)
        eventually(lambda: acc.info().num_waiting == 1)
        closing.close()
        with pytest.raises(gradserve.CallCancelledError) as error:
            waiting.result(PATIENCE_SECONDS)
    assert error.value.request_id is not None
    eventually(lambda: acc.info().num_waiting == 0)


async def test_close_cancels_calls_under_way_aio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", (), name)
        closing = gradserve.aio.connect(server_address)
        other = await closing.conditional_accumulator("float32", (), name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(other.take_grad(1, timeout=PATIENCE_SECONDS))
        await eventually_async(num_waiting)
        await closing.close()
        with pytest.raises(gradserve.CallCancelledError) as error:
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        assert error.value.request_id is not None
        await eventually_async(num_waiting, lambda count: count == 0)


async def test_cancelling_a_task_cancels_its_call(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", (), name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(acc.take_grad(1, timeout=PATIENCE_SECONDS))
        await eventually_async(num_waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually_async(num_waiting, lambda count: count == 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await acc.take_grad(1, timeout=PATIENCE_SECONDS)
        await eventually_async(num_waiting, lambda count: count == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_private_accumulators_end_with_their_client(client: gradserve.Client, name: str, kind: str) -> None:
    arguments: Any = {"w": np.zeros(2)} if kind == "gradient_accumulator" else "float32"
    with gradserve.connect(client.address) as other:
        private = getattr(other, kind)(arguments, name=name)
        shared = getattr(other, kind)(arguments, shared_name=name)
        assert private.name.startswith(f"{name}-")
        listed = {info.name for info in client.list_accumulators()}
        assert {private.name, shared.name} <= listed
    listed = {info.name for info in client.list_accumulators()}
    assert private.name not in listed
    assert shared.name in listed
    assert getattr(client, kind)(arguments, shared_name=name).delete()


@pytest.mark.parametrize("kind", KINDS)
async def test_private_accumulators_end_with_their_client_aio(client: gradserve.Client, name: str, kind: str) -> None:
    arguments: Any = {"w": np.zeros(2)} if kind == "gradient_accumulator" else "float32"
    async with gradserve.aio.connect(client.address) as other:
        private = await getattr(other, kind)(arguments, name=name)
        assert private.name in {info.name for info in client.list_accumulators()}
    assert private.name not in {info.name for info in client.list_accumulators()}


def test_closing_ends_in_time_where_answers_are_slow(name: str) -> None:
    """Each question whether a gradient is durable takes four seconds, which count as the pauses between them do."""
    now = 0.0

    def answer(exchange: Exchange) -> Any:
        nonlocal now
        match exchange:
            case Pause(seconds):
                now += seconds
            case Unary(method="CreateAccumulator", request=request):
                assert isinstance(request, messages_pb2.CreateAccumulatorRequest)
                info = accumulator_pb2.AccumulatorInfo(accumulator=request.accumulator, server_incarnation="first run")
                info.spec.durability = accumulator_pb2.DURABILITY_ROUND
                return messages_pb2.CreateAccumulatorResponse(info=info)
            case Unary(method="ApplyGradient"):
                accepted = accumulator_pb2.APPLY_OUTCOME_ACCEPTED
                return messages_pb2.ApplyGradientResponse(outcome=accepted, round=1, num_rounds=0)
            case Unary(method="GetNumAccumulated", at_most=at_most):
                now += min(4.0, at_most)
                return messages_pb2.GetNumAccumulatedResponse(num_accumulated=1, num_rounds=0)
        return None

    calls = ClientCalls.of_new_client(TimeLimits(), clock=lambda: now)
    client = client_over(FakeTransport(answer), "nowhere", calls)
    client.conditional_accumulator("float32", (), name, durability="round").apply_grad(1.0)
    with pytest.raises(gradserve.NotDurableError):
        client.close(timeout=10.0)
    assert now == pytest.approx(10.0)
