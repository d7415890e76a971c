"""What a client does by itself when the server is started again, on its state directory or without one."""

import itertools
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.accumulators import session
from gradserve.calls.retries import RetryPolicy
from gradserve.transport.blocking import transport
from gradserve.transport.settings import TransportName
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer

WAYS: tuple[TransportName, ...] = ("shared_memory", "bulk", "grpc")
LARGE = 1 << 20
NEVER = 1e6
"""A pause that no test outlives: until then, the client sends nothing again by itself."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send again with their next call only: whether the background is earlier would be a matter of luck."""
    monkeypatch.setattr(session, "_INTERVAL_SECONDS", NEVER)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartingServer]:
    with RestartingServer(tmp_path / "state") as running:
        yield running


@pytest.fixture
def forgetful() -> Iterator[RestartingServer]:
    with RestartingServer(None) as running:
        yield running


def kept(client: gradserve.Client) -> int:
    return sum(len(each.kept or ()) for each in client._calls._accumulators.watches[0].keeping)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_current_round_are_sent_again(server: RestartingServer, way: TransportName) -> None:
    with gradserve.connect(server.address, transport=way) as client:
        model = client.gradient_accumulator(
            {"d": gradserve.DenseSpec("float32", (LARGE,)), "s": gradserve.SparseSpec("float32")},
            shared_name="sum",
            reduction_type="SUM",
        )
        array = client.empty(LARGE, "float32")
        for number in (1.0, 2.0):
            array[:] = number
            model.apply_grad({"d": array, "s": gradserve.IndexedSlices(array[:1], np.array([int(number)]))})
        array[:] = 4.0
        server.restart()
        assert model.num_accumulated() == 2
        model.apply_grad({"d": array, "s": gradserve.IndexedSlices(array[:1], np.array([1]))})
        server.restart()
        average = model.take_grad(3)
        assert set(average["d"].tolist()) == {7.0}
        rows = average["s"]
        assert isinstance(rows, gradserve.IndexedSlices)
        assert (rows.indices.tolist(), rows.values.tolist()) == ([1, 2], [5.0, 2.0])
        assert kept(client) == 0
        server.restart()
        assert model.num_accumulated() == 0


async def test_gradients_of_the_current_round_are_sent_again_aio(server: RestartingServer) -> None:
    async with gradserve.aio.connect(server.address) as client:
        accumulator = await client.conditional_accumulator("float64", (2,), "sum", reduction_type="SUM")
        await accumulator.apply_grad(np.ones(2))
        server.restart()
        await accumulator.apply_grad(np.ones(2))
        assert (await accumulator.take_grad(2)).tolist() == [2, 2]


def test_gradients_are_sent_again_while_the_program_does_nothing(
    server: RestartingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_INTERVAL_SECONDS", 0.02)
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        client.conditional_accumulator("float32", (LARGE,), "sum").apply_grad(np.ones(LARGE))
        server.restart()
        taken = other.conditional_accumulator("float32", (LARGE,), "sum").take_grad(1)
        assert set(taken.tolist()) == {1.0}
        eventually(lambda: kept(client) == 0)


def test_a_gradient_that_comes_late_because_of_the_restart_counts(server: RestartingServer) -> None:
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        mine, its = (
            each.conditional_accumulator("float32", (), "sum", reduction_type="SUM") for each in (client, other)
        )
        mine.apply_grad(1.0)
        server.restart()
        its.apply_grad(2.0)
        assert its.take_grad(1) == 2
        assert mine.num_accumulated() == 1
        assert its.take_grad(1) == 1


def test_a_round_that_others_have_ended_is_not_sent_again(server: RestartingServer) -> None:
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        accumulator = client.conditional_accumulator("float32", (), "sum", reduction_type="SUM")
        accumulator.apply_grad(1.0)
        assert kept(client) == 1
        assert other.conditional_accumulator("float32", (), "sum", reduction_type="SUM").take_grad(1) == 1
        server.restart()
        assert accumulator.num_accumulated() == 0
        accumulator.apply_grad(2.0, local_step=1)
        assert accumulator.take_grad(1) == 2


def test_raw_ops_send_again_too(server: RestartingServer) -> None:
    with gradserve.connect(server.address) as client:
        ops = client.raw_ops
        handle = ops.ConditionalAccumulator(dtype="float32", shape=(), shared_name="sum")
        ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=1.0)
        server.restart()
        assert ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32") == 1


def test_a_client_that_begins_during_a_restart_waits_for_the_server(
    server: RestartingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", "100000")
    pauses, many = itertools.count(1), threading.Event()

    def sleep(_seconds: float) -> None:
        if next(pauses) > len(RetryPolicy().pauses):
            many.set()
        wait(0.01)

    wait = time.sleep
    monkeypatch.setattr(transport, "time", types.SimpleNamespace(sleep=sleep))
    server.stop()
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.server_info)
        assert many.wait(PATIENCE_SECONDS)
        server.start()
        assert asked.result(PATIENCE_SECONDS).version == gradserve.__version__


def test_a_call_that_waits_goes_on(server: RestartingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with gradserve.connect(server.address) as client, ThreadPoolExecutor(1) as threads:
        accumulator = client.conditional_accumulator("float32", (), "sum", reduction_type="SUM")
        accumulator.apply_grad(1.0)
        waiting = threads.submit(accumulator.take_grad, 2)
        eventually(lambda: accumulator.info().num_waiting == 1)
        server.restart()
        accumulator.apply_grad(2.0)
        assert waiting.result(PATIENCE_SECONDS) == 3


@pytest.mark.parametrize("reason", ["no room", "handle"])
def test_gradients_that_cannot_be_sent_again_are_told_once(
    server: RestartingServer, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_KEPT_BYTES", "2500" if reason == "no room" else "10000")
    with gradserve.connect(server.address) as client:
        accumulator = client.conditional_accumulator("float64", (100,), "sum", reduction_type="SUM")
        small = client.conditional_accumulator("float64", (), "small")
        small.apply_grad(1.0)
        gradient = np.ones(100)
        for _ in range(2):
            accumulator.apply_grad(client.put(gradient) if reason == "handle" else gradient)
        server.restart()
        with pytest.raises(
            gradserve.LostError, match="has lost 2 gradients .* for accumulator 'default/sum'"
        ) as caught:
            accumulator.apply_grad(gradient)
        assert (caught.value.accumulator, caught.value.num_gradients) == ("sum", 2)
        assert accumulator.num_accumulated() == 0, "the call that was refused had no effect"
        assert small.take_grad(1) == 1


def test_an_accumulator_that_is_gone(server: RestartingServer) -> None:
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        accumulator = client.conditional_accumulator("float32", (), "sum")
        accumulator.apply_grad(1.0)
        server.restart()
        other.delete_accumulator("sum")
        with pytest.raises(gradserve.LostError, match="'default/sum' is gone .* and 1 gradient"):
            accumulator.num_accumulated()
        with pytest.raises(gradserve.NotFoundError):
            accumulator.num_accumulated()
        assert kept(client) == 0


@pytest.mark.parametrize("shared_name", ["sum", None])
def test_without_durability_the_loss_is_told_once(forgetful: RestartingServer, shared_name: str | None) -> None:
    with gradserve.connect(forgetful.address) as client:
        accumulator = client.conditional_accumulator("float32", (), shared_name, "sum", reduction_type="SUM")
        untouched = client.conditional_accumulator("float32", (), "untouched")
        accumulator.apply_grad(1.0)
        accumulator.take_grad(1)
        for _ in range(2):
            accumulator.apply_grad(1.0, local_step=1)
        forgetful.restart()
        with pytest.raises(gradserve.LostError, match="lost accumulator 'default/sum.* its step, 1, .* 2 gradients"):
            accumulator.num_accumulated()
        accumulator.apply_grad(5.0)
        assert accumulator.take_grad(1) == 5
        assert untouched.num_accumulated() == 0
        forgetful.restart()
        with pytest.raises(gradserve.LostError, match="its step, 1, .* 0 gradients"):
            accumulator.apply_grad(1.0)
        untouched.set_global_step(7)
        forgetful.restart()
        with pytest.raises(gradserve.LostError, match="its step, 7, ") as caught:
            untouched.apply_grad(1.0, 7)
        untouched.apply_grad(1.0, request_id=caught.value.request_id)
        assert untouched.take_grad(1) == 1


def test_an_object_that_ends_with_its_accumulator(forgetful: RestartingServer) -> None:
    """No call reaches the accumulator that was created again, though nothing was lost: not even one that waits."""
    with (
        gradserve.connect(forgetful.address) as client,
        gradserve.connect(forgetful.address) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        first, second, following = [
            client.gradient_accumulator({"x": np.zeros(2)}, "sum", ends_when_lost=ends) for ends in (True, True, False)
        ]
        waiting = threads.submit(first.take_grad, 1)
        eventually(lambda: first.info().num_waiting, lambda number: number == 1)
        forgetful.restart()
        other.gradient_accumulator({"x": np.zeros(2)}, "sum").push_pull({"x": np.ones(2)}, 1)
        with pytest.raises(gradserve.LostError, match="its step, 0, .* 0 gradients"):
            waiting.result()
        for ended in (first, first, second, second):
            with pytest.raises(gradserve.LostError, match="its step, 0, .* 0 gradients"):
                ended.push_pull({"x": np.ones(2)}, 1)
        assert following.info().global_step == 1
        assert client.gradient_accumulator({"x": np.zeros(2)}, "sum", ends_when_lost=True).info().global_step == 1


async def test_without_durability_the_loss_is_told_once_aio(forgetful: RestartingServer) -> None:
    async with gradserve.aio.connect(forgetful.address) as client:
        accumulator = await client.gradient_accumulator({"x": np.zeros(2)}, "sum")
        await accumulator.apply_grad({"x": np.ones(2)})
        forgetful.restart()
        with pytest.raises(gradserve.LostError, match="1 gradient that"):
            await accumulator.apply_grad({"x": np.ones(2)})
        assert (await accumulator.push_pull({"x": np.ones(2)}, 1))["x"].tolist() == [1, 1]


def test_close_waits_until_rounds_have_ended(server: RestartingServer) -> None:
    with gradserve.connect(server.address) as other, ThreadPoolExecutor(1) as threads:
        its = other.conditional_accumulator("float32", (), "sum", reduction_type="SUM")
        client = gradserve.connect(server.address)
        client.conditional_accumulator("float32", (), "sum", reduction_type="SUM").apply_grad(1.0)
        client.conditional_accumulator("float32", (), None, "private").apply_grad(1.0)
        closing = threads.submit(client.close, 60)
        server.restart()
        its.apply_grad(2.0)
        assert its.take_grad(2) == 3
        closing.result(PATIENCE_SECONDS)


def test_close_names_what_is_not_durable(server: RestartingServer) -> None:
    client = gradserve.connect(server.address)
    accumulator = client.conditional_accumulator("float32", (), "sum", reduction_type="SUM")
    for _ in range(2):
        accumulator.apply_grad(1.0)
    with pytest.raises(gradserve.NotDurableError, match="2 of accumulator 'sum' are in rounds that have not") as caught:
        client.close(0.05)
    assert caught.value.gradients == {"sum": 2}
    client.close()
    with pytest.raises(gradserve.CallCancelledError):
        accumulator.num_accumulated()


async def test_close_names_what_is_not_durable_aio(server: RestartingServer) -> None:
    client = gradserve.aio.connect(server.address)
    accumulator = await client.conditional_accumulator("float32", (), "sum")
    await accumulator.apply_grad(1.0)
    with pytest.raises(gradserve.NotDurableError):
        await client.close(0.05)
    await client.close()


def test_a_block_that_ends_with_an_error_does_not_wait(server: RestartingServer) -> None:
    def fails() -> None:
        with gradserve.connect(server.address) as client:
            client.conditional_accumulator("float32", (), "sum").apply_grad(1.0)
            raise KeyError("the program's own")

    with pytest.raises(KeyError) as caught:
        fails()
    (note,) = caught.value.__notes__
    assert "1 of accumulator 'sum'" in note


def test_close_without_a_server(server: RestartingServer) -> None:
    client = gradserve.connect(server.address)
    client.conditional_accumulator("float32", (), "sum").apply_grad(1.0)
    server.stop()
    try:
        with pytest.raises(gradserve.NotDurableError):
            client.close(0.2)
    finally:
        server.start()


def test_stored_tensors_and_layers_that_are_lost_are_named(forgetful: RestartingServer) -> None:
    with gradserve.connect(forgetful.address) as client:
        handle = client.put(np.ones(2))
        layer = client.batch_norm(scope="bn")
        layer.forward(np.ones((2, 3), np.float32))
        forgetful.restart()
        with pytest.raises(gradserve.NotFoundError, match=f"'{handle.handle}': the server was started again since"):
            client.get(handle)
        with pytest.raises(
            gradserve.NotFoundError, match="no layer 'default/bn' any more: .* lost when the server was"
        ):
            layer.forward(np.ones((2, 3), np.float32))
        client.batch_norm(scope="bn")
        with pytest.raises(
            gradserve.NotFoundError, match="'default/bn' was deleted, or was lost when .* another one has"
        ):
            layer.describe()
