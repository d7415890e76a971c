"""Accumulators in the memory of a simulated GPU, on a whole server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

import gradserve
from gradserve import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError, Outcome
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_protocol.v1.accumulator_service_pb2_grpc import AccumulatorServiceStub
from gradserve_server.app import Server
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS

F32 = np.float32
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SHAPE = (37, 129)


def gradients(dtype: Any, count: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(SHAPE).astype(dtype) for _ in range(count)]


def used_on_device(gpu: LocalServer) -> int:
    return gpu.inspect(lambda server: server.evictor.device.used if server.evictor else -1)


def used_on_host(gpu: LocalServer) -> int:
    return gpu.inspect(lambda server: server.usage.memory.used)


def shared_bytes(server: Server) -> int:
    return server.sockets.context.shared_memory.used


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"reduction_type": "SUM"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_host(worker: gradserve.Client, dtype: Any, options: dict[str, Any]) -> None:
    found = []
    count = 17 if options.get("deterministic") else 4
    for device in ("cuda:0", "cpu"):
        acc = worker.conditional_accumulator(np.dtype(dtype), SHAPE, device=device, **options)
        for number, gradient in enumerate(gradients(dtype, count)):
            acc.apply_grad(gradient, weight=0.5 + number / 7, worker_id=f"w{number * 3 % count}")
        found.append(acc.take_grad(count))
        assert acc.info().device == device
        acc.delete()
    assert found[0].tobytes() == found[1].tobytes()


def test_where_accumulators_are(worker: gradserve.Client, name: str) -> None:
    assert worker.conditional_accumulator("float32", ()).info().device == "cuda:0", "by the server's default"
    assert worker.sparse_conditional_accumulator("float32", (3, 1)).info().device == "cpu"
    shared = worker.conditional_accumulator("float32", (), shared_name=name)
    with pytest.raises(AlreadyExistsError, match="device is cuda:0, not cpu"):
        worker.conditional_accumulator("float32", (), shared_name=name, device="cpu")
    for device in ("cuda:0", "auto"):
        assert worker.conditional_accumulator("float32", (), shared_name=name, device=device).info() == shared.info()
    assert worker.sparse_conditional_accumulator("float32", (3, 1), device="auto").info().device == "cpu"
    shared.delete()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda client: client.conditional_accumulator("float32", (), device="cuda:1"),
            "expected a device of this server, cpu, cuda:0 or auto, got 'cuda:1'",
        ),
        (
            lambda client: client.sparse_conditional_accumulator("float32", (3, 1), device="cuda:0"),
            "expected cpu for an accumulator with sparse components, got 'cuda:0'",
        ),
    ],
)
def test_devices_that_cannot_be(worker: gradserve.Client, make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make(worker)
    assert message in str(error.value)
    assert error.value.field == "spec.device"


def test_a_device_is_text(worker: gradserve.Client) -> None:
    with pytest.raises(InvalidArgumentError, match="expected text for device, got 0"):
        worker.conditional_accumulator("float32", (), device=0)  # type: ignore[arg-type]


def test_many_components_and_mixed_dtypes(worker: gradserve.Client) -> None:
    rng = np.random.default_rng(0)
    model = {f"p{number}": rng.standard_normal(number % 13 + 1).astype(DTYPES[number % 4]) for number in range(300)}
    acc = worker.gradient_accumulator(model)
    for weight in (1.0, 2.0):
        acc.apply_grad({name: value * value.dtype.type(weight) for name, value in model.items()}, weight=weight)
    average = acc.take_grad(2)
    for name, value in model.items():
        wide = value.astype(np.float64)
        twice = (value * value.dtype.type(2.0)).astype(np.float64)
        np.testing.assert_allclose(average[name].astype(np.float64), (wide + 2 * twice) / 3, rtol=1e-2)


@pytest.fixture
def stub(gpu: LocalServer) -> Iterator[AccumulatorServiceStub]:
    """For calls that clients in Python do not make: with handles that are released, and averages that stay."""
    with grpc.insecure_channel(gpu.address) as channel:
        yield AccumulatorServiceStub(channel)


def released(stub: AccumulatorServiceStub, name: str, handle: gradserve.TensorHandle, step: int = 0) -> None:
    part = accumulator_pb2.ComponentGradient(dense=tensor_pb2.Tensor(handle=handle.handle))
    ref = accumulator_pb2.AccumulatorRef(name=name)
    request = messages_pb2.ApplyGradientRequest(accumulator=ref, gradient=[part], release_handles=True, local_step=step)
    stub.ApplyGradient(request)


def kept(stub: AccumulatorServiceStub, name: str, shape: tuple[int, ...]) -> gradserve.TensorHandle:
    """Takes an average of one gradient, which stays on the server."""
    keep = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP)
    request = messages_pb2.TakeGradientRequest(
        accumulator=accumulator_pb2.AccumulatorRef(name=name), num_required=1, placement=keep
    )
    handle = stub.TakeGradient(request).average.components[0].dense.handle
    return gradserve.TensorHandle(handle, np.dtype(F32), shape)


def test_a_kept_gradient_does_not_leave_the_device(
    worker: gradserve.Client, stub: AccumulatorServiceStub, gpu: LocalServer, name: str
) -> None:
    """It becomes the sum, the sum the average, and the average a tensor that is kept: all in the same memory."""
    value = np.arange(1024, dtype=F32)
    acc = worker.conditional_accumulator("float32", (1024,), shared_name=name)
    released(stub, name, worker.put(value, device="cuda:0"))
    assert (used_on_device(gpu), used_on_host(gpu)) == (4096, 0), "the sum is the gradient"
    average = kept(stub, name, (1024,))
    assert used_on_host(gpu) == 0
    acc.apply_grad(average, local_step=1)
    assert worker.get(average, release=True).tolist() == value.tolist(), "which was not added to"
    assert acc.take_grad(1).tolist() == value.tolist()
    released(stub, name, worker.put(value, device="cpu"), step=2)
    assert acc.take_grad(1).tolist() == value.tolist()
    acc.delete()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_gradients_of_other_dtypes(worker: gradserve.Client, device: str) -> None:
    acc = worker.conditional_accumulator("float16", (3,))
    handles = [worker.put(np.array(each), device=device) for each in ([1.0, 2.0, 3.0], [1, 1e5, 3], [4, 5, 6])]
    acc.apply_grad(handles[0])
    with pytest.raises(InvalidArgumentError, match=r"got 100000 at \[1\], which does not fit into float16"):
        acc.apply_grad(handles[1])
    acc.apply_grad(handles[2])
    assert acc.take_grad(2).tolist() == [2.5, 3.5, 4.5]
    worker.delete(*handles)


@pytest.mark.parametrize("where", ["inline", "cpu", "cuda:0"])
def test_values_that_are_not_finite(worker: gradserve.Client, where: str) -> None:
    acc = worker.conditional_accumulator("float32", (2, 3), refuse_non_finite=True)
    good, bad = np.ones((2, 3), F32), np.array([[1, 2, 3], [4, np.inf, np.nan]], F32)
    sent = [good, bad] if where == "inline" else [worker.put(value, device=where) for value in (good, bad)]
    acc.apply_grad(sent[0])
    with pytest.raises(InvalidArgumentError, match=r"expected finite values, got inf at \[1,1\]"):
        acc.apply_grad(sent[1])
    assert acc.take_grad(1).tolist() == good.tolist()
    worker.delete(*worker.list_tensors())


def test_workers_push_and_pull(worker: gradserve.Client) -> None:
    acc = worker.gradient_accumulator({"w": np.empty(100_000, F32)}, keep_averages=2)

    def push(number: int, step: int) -> Any:
        value = np.full(100_000, number + step, F32)
        return acc.push_pull({"w": value}, 4, step, worker_id=f"w{number}")["w"]

    with ThreadPoolExecutor(4) as threads:
        for step in range(3):
            pulled = list(threads.map(push, range(4), [step] * 4))
            assert all((each == 1.5 + step).all() for each in pulled)
    assert (acc.read_average(2)["w"] == 2.5).all()


def test_a_stale_gradient_and_a_repeated_call(worker: gradserve.Client) -> None:
    acc = worker.conditional_accumulator("float32", (2,))
    acc.set_global_step(3)
    assert acc.apply_grad(np.ones(2, F32), 2).outcome is Outcome.STALE
    first = acc.apply_grad(np.ones(2, F32), 3, request_id=7)
    again = acc.apply_grad(np.ones(2, F32), 3, request_id=7)
    assert (first.outcome, again.duplicate, acc.num_accumulated()) == (Outcome.ACCEPTED, True, 1)
    with pytest.raises(DeadlineExceededError):
        acc.take_grad(2, timeout=0.01)
    with pytest.raises(InvalidArgumentError, match=r"Shape mismatch: expected \[2\], got \[3\]"):
        acc.apply_grad(np.ones(3, F32), 3)
    assert acc.take_grad(1).tolist() == [1, 1]


def test_readers_share_one_copy_of_an_average(
    worker: gradserve.Client, stub: AccumulatorServiceStub, gpu: LocalServer, name: str
) -> None:
    acc = worker.conditional_accumulator("float32", (4096,), shared_name=name)
    acc.apply_grad(np.ones(4096, F32))
    worker.delete(kept(stub, name, (4096,)))
    assert used_on_host(gpu) == 0, "nobody has read it"
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda _: acc.read_average(), range(8)))
    assert all((each == 1).all() for each in read)
    assert used_on_host(gpu) == 4096 * 4, "one copy"
    acc.apply_grad(np.full(4096, 3, F32), 1)
    worker.delete(kept(stub, name, (4096,)))
    assert used_on_host(gpu) == 0, "it has gone with its average"
    acc.delete()


@pytest.mark.parametrize("deterministic", [False, True])
def test_accumulators_that_end_leave_nothing(worker: gradserve.Client, *, deterministic: bool) -> None:
    """Within a round, and with an average that was read."""
    acc = worker.conditional_accumulator("float64", (999,), deterministic=deterministic)
    for step in (0, 1):
        acc.apply_grad(np.ones(999), step, worker_id="a")
        acc.take_grad(1)
        acc.apply_grad(np.ones(999), step + 1, worker_id="b")
    acc.delete()


@pytest.mark.parametrize("way", ["shared_memory", "bulk", "grpc"])
@pytest.mark.parametrize("copy", [True, False])
def test_rounds_are_the_same_on_every_way(gpu: LocalServer, way: Any, *, copy: bool) -> None:
    """Also from memory that a client shares and changes later, and to where it reads averages in place."""
    size = 1 << 18
    rng = np.random.default_rng(0)
    with gradserve.connect(gpu.address, transport=way, timeout=PATIENCE_SECONDS) as client:
        acc = client.conditional_accumulator("float32", shape=(size,))
        mine = client.empty(size, "float32")
        for step in range(2):
            other = rng.normal(size=size).astype(F32)
            mine[:] = rng.normal(size=size)
            expected = (mine + other) / F32(2)
            acc.apply_grad(mine, local_step=step)
            acc.apply_grad(other, local_step=step)
            mine[:] = np.nan
            average = acc.take_grad(2, copy=copy)
            np.testing.assert_array_equal(average, expected)
            assert average.flags.writeable is copy
            if way == "shared_memory":
                assert gpu.inspect(shared_bytes) >= size * 4, "it is where it can be read in place"
            again = acc.read_average(step + 1, copy=copy)
            np.testing.assert_array_equal(again, expected)
            assert used_on_host(gpu) >= size * 4, "one copy"
            del average, again
