"""Faults happen to the calls that they were planted for, as often as was said, and have the effect that was said."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradserve
from gradserve.testing import Faults, ServerThread
from gradserve.transport.settings import Transport
from tests.servers.connecting import connect_with, without_retries
from tests.servers.polling import PATIENCE_SECONDS

ONE = {"w": np.ones(4)}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread() as server:
        yield server


@pytest.fixture
def faults(server: ServerThread) -> Iterator[Faults]:
    yield server.faults
    server.faults.clear()


@pytest.fixture(params=[Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY], ids=str)
def client(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[gradserve.Client]:
    """A client that does not repeat calls by itself."""
    with connect_with(server.address, without_retries(PATIENCE_SECONDS, request.param)) as connected:
        yield connected


@pytest.fixture
def model(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    return client.gradient_accumulator({"w": np.zeros(4)}, name, reduction_type="SUM")


def test_a_worker_fails_at_a_step(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    fault = faults.fail_at("b", 1)
    for step in range(2):
        model.apply_grad(ONE, local_step=step, worker_id="a")
        if step == 1:
            with pytest.raises(gradserve.InternalError, match=r"fail_at\('b', 1\)"):
                model.apply_grad(ONE, local_step=step, worker_id="b")
        model.apply_grad(ONE, local_step=step, worker_id="b")  # the call after it counts
        np.testing.assert_array_equal(model.take_grad(2)["w"], np.full(4, 2.0))
        assert model.num_accumulated() == 0
    assert fault.happened == ["ApplyGradient"]


def test_the_error_is_the_one_that_was_asked_for(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    faults.fail_at("a", 0, error=gradserve.ResourceExhaustedError)
    with pytest.raises(gradserve.ResourceExhaustedError, match="fail_at"):
        model.push_pull(ONE, 1, 0, worker_id="a")
    assert model.num_accumulated() == 0


def test_a_dropped_reply(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    fault = faults.drop_reply("PushPull")
    with pytest.raises(gradserve.UnavailableError, match="the reply was dropped") as lost:
        model.push_pull(ONE, 1, 0)
    assert model.info().global_step == 1  # it was carried out
    again = model.push_pull(ONE, 1, 0, request_id=lost.value.request_id)
    assert (again.step, again.num_gradients) == (1, 1)
    np.testing.assert_array_equal(again["w"], ONE["w"])
    assert fault.happened == ["PushPull"]


def test_a_repeated_request_counts_once(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    fault = faults.duplicate("ApplyGradient", "TakeGradient", times=3)
    for _ in range(2):
        model.apply_grad(ONE)
    np.testing.assert_array_equal(model.take_grad(2)["w"], np.full(4, 2.0))
    assert model.info().global_step == 1
    assert fault.happened == ["ApplyGradient", "ApplyGradient", "TakeGradient"]


def test_a_delay_lets_others_pass(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    fault = faults.delay(0.05, "ApplyGradient")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(model.apply_grad, ONE)
        assert late.result(PATIENCE_SECONDS).outcome is gradserve.ACCEPTED
    assert fault.happened == ["ApplyGradient"]
    assert model.num_accumulated() == 1


def test_faults_concern_nothing_else(faults: Faults, model: gradserve.GradientAccumulator) -> None:
    unlikely = faults.drop_reply(times=None, probability=0.0)
    other = faults.drop_reply("PushPull", times=None)
    model.apply_grad(ONE)
    assert (unlikely.happened, other.happened) == ([], [])
    faults.clear()
    assert model.push_pull(ONE, 1, 0).step == 1


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda faults: faults.drop_reply("push_pull"), "expected methods of the server such as 'PushPull'"),
        (lambda faults: faults.delay(1, "Apply"), "expected methods of the server"),
        (lambda faults: faults.duplicate("PutTensors"), "expected methods whose requests have an id, got 'PutTensors'"),
    ],
    ids=["drop_reply", "delay", "duplicate"],
)
def test_unknown_methods_are_refused(plant: object, message: str) -> None:
    assert callable(plant)
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        plant(Faults())
