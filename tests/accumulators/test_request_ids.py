"""Request ids: those that a client gives its calls, and those that its user gives them."""

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.identity import RequestIds
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually_async

KEY = ("default", "net")


def grads(value: float) -> dict[str, np.ndarray]:
    return {"w": np.array([value], np.float32)}


@pytest.fixture
def model(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    return client.gradient_accumulator(grads(0), shared_name=name)


@pytest.fixture
def elsewhere(server: LocalServer, name: str, model: Any) -> Iterator[gradserve.GradientAccumulator]:
    """The same accumulator in another client, as after a restart of the worker."""
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        yield client.gradient_accumulator(grads(0), shared_name=name)


def given_up(model: gradserve.GradientAccumulator, value: float, worker_id: str = "w") -> int:
    """Returns the request id of a push_pull whose gradient is in a round of three, and that does not wait for it."""
    with pytest.raises(gradserve.DeadlineExceededError) as error:
        model.push_pull(grads(value), 3, timeout=0, worker_id=worker_id)
    assert error.value.request_id is not None
    return error.value.request_id


def test_numbers_of_the_users_own_are_those_of_no_other_call(model: gradserve.GradientAccumulator) -> None:
    """Neither of one that the client has numbered before, nor of one that it numbers later."""
    counted = count(1)
    for number in range(8):
        for request_id in (number, None, 16 - number):
            result = model.apply_grad(grads(number), request_id=request_id)
            assert (result.duplicate, result.num_accumulated) == (False, next(counted))
    for number in range(8):
        assert model.apply_grad(grads(number), request_id=number).duplicate
    assert model.num_accumulated() == 24


def test_the_id_of_an_error_names_the_call_in_another_client(
    model: gradserve.GradientAccumulator, elsewhere: gradserve.GradientAccumulator
) -> None:
    request_id = given_up(model, 3)
    for number in range(20):  # the numbers of the first client, too
        assert not elsewhere.apply_grad(grads(number)).duplicate
    again = elsewhere.push_pull(grads(3), 3, timeout=PATIENCE_SECONDS, worker_id="w", request_id=request_id)
    assert (again.duplicate, again.num_gradients) == (True, 21)
    with pytest.raises(gradserve.InvalidArgumentError, match="expected the same content in every call with request_id"):
        elsewhere.apply_grad(grads(3), request_id=request_id)


def test_another_client_asks_for_several_averages_in_any_order(
    model: gradserve.GradientAccumulator, elsewhere: gradserve.GradientAccumulator
) -> None:
    """One that it asks for first does not say that it has those before."""
    ids = [given_up(model, value, f"w{value}") for value in (1, 3)]
    elsewhere.push_pull(grads(5), 3)
    for step in range(1, 4):  # from now on, the average is kept for these calls alone
        elsewhere.push_pull(grads(9), 1, local_step=step)
    for value, request_id in ((3, ids[1]), (1, ids[0])):
        average = elsewhere.push_pull(grads(value), 3, worker_id=f"w{value}", request_id=request_id)
        assert (average.step, average["w"].tolist()) == (1, [3])


async def test_an_interrupted_call_is_made_again_with_an_id_that_was_known_before(
    server: LocalServer, name: str
) -> None:
    """Its average is kept for it, although the client makes other calls in the meantime."""
    async with gradserve.aio.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        model = await client.gradient_accumulator(grads(0), shared_name=name)
        request_id = await client.new_request_id()
        call = asyncio.create_task(model.push_pull(grads(3), 3, worker_id="w", request_id=request_id))
        await eventually_async(model.num_accumulated)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await model.push_pull(grads(5), 2)
        for step in range(1, 4):  # from now on, the average is kept for the interrupted call alone
            await model.push_pull(grads(9), 1, local_step=step)
        again = await model.push_pull(grads(3), 3, worker_id="w", request_id=request_id)
        assert (again.duplicate, again.step, again["w"].tolist()) == (True, 1, [4])


def test_calls_with_ids_that_are_never_made_hold_up_nothing(
    model: gradserve.GradientAccumulator, client: gradserve.Client
) -> None:
    ids = {client.new_request_id() for _ in range(2000)}
    assert len(ids) == 2000
    for step in range(3):
        assert model.push_pull(grads(step), 1, local_step=step).step == step + 1


def test_the_id_of_an_error_is_the_number_that_the_user_gave(model: gradserve.GradientAccumulator) -> None:
    with pytest.raises(gradserve.DeadlineExceededError, match=r"with request_id=7 \[GS_\w+\]$") as error:
        model.take_grad(1, timeout=0, request_id=7)
    assert error.value.request_id == 7


@pytest.mark.parametrize("request_id", [-1, 1 << 192, 1.5, "7"])
def test_what_is_no_request_id(model: gradserve.GradientAccumulator, request_id: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"expected an integer.* for request_id, got") as error:
        model.apply_grad(grads(1), request_id=request_id)
    assert error.value.field == "request_id"
    assert model.num_accumulated() == 0


def test_what_users_see_of_an_id_does_not_tell_the_clients_id() -> None:
    """Whoever knows that can end what is private to the client."""
    ids = RequestIds("secret")
    for call in (ids.new_call(), ids.call(7)):
        message = accumulator_pb2.RequestId()
        ids.write(message, call, KEY)
        assert "secret" not in message.client_id
        assert ids.call(ids.request_id(call)) == call
    assert ids.private_name().partition("-")[0] not in ids.new_call().client_id
