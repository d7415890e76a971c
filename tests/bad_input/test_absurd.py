"""Absurd values, sizes and bytes."""

import math
import re
import socket
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import (
    EXHAUSTED,
    F32,
    INT64_MAX,
    INT64_MIN,
    INVALID,
    MIB,
    OK,
    SPECS,
    Apply,
    Create,
    PushPull,
    Read,
    Take,
    component,
    dense,
    identity,
    ref,
    sparse,
    spec,
    state,
)
from tests.bad_input.test_streams import chunk, header
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import METHODS, RawCalls, failure_of


def test_values_that_are_no_numbers_are_numbers(client: gradserve.Client) -> None:
    acc = client.conditional_accumulator("float32", (4,))
    acc.apply_grad([math.nan, math.inf, math.inf, 3e38])
    acc.apply_grad([1, 1, -math.inf, 3e38])
    assert np.array_equal(acc.take_grad(2), [math.nan, math.inf, math.nan, math.inf], equal_nan=True)
    rows = client.sparse_conditional_accumulator("float16")
    rows.apply_grad([0, 2], [math.nan, -math.inf])
    rows.apply_grad([2, 3], [1, 65504])
    assert np.array_equal(rows.take_grad(2).values, [math.nan, -math.inf, 65504], equal_nan=True)


WEIGHTS = {"float16": (2.0**-64, 2.0**64), "bfloat16": (2.0**-64, 2.0**64), "float32": (2.0**-64, 2.0**64)} | {
    "float64": (2.0**-512, 2.0**512)
}


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_extreme_weights(client: gradserve.Client, dtype: str) -> None:
    """A gradient has the same average, whatever its weight is; one that no sum could hold is refused."""
    acc = client.gradient_accumulator({"d": gradserve.DenseSpec(dtype), "s": gradserve.SparseSpec(dtype)})
    gradient = {"d": [1.5, 0.0], "s": gradserve.IndexedSlices(np.full((1, 2), 1.5), np.array([1]))}
    for weight in WEIGHTS[dtype]:
        for _ in range(3):
            acc.apply_grad(gradient, weight=weight, local_step=9)
        average = acc.take_grad(3)
        rows: Any = average["s"]
        assert (average["d"].tolist(), rows.values.tolist()) == ([1.5, 0.0], [[1.5, 1.5]])
    for weight in (5e-324, WEIGHTS[dtype][0] / 2, WEIGHTS[dtype][1] * 2, 1.7e308):
        with pytest.raises(gradserve.InvalidArgumentError, match=r"a weight from 2\^-\d+ .* same factor") as raised:
            acc.apply_grad(gradient, weight=weight, local_step=9)
        assert raised.value.field == "weight"
    assert acc.info().num_accumulated == 0


@pytest.mark.parametrize("weight", [2.0**-15, 2.0**16])
def test_weights_of_sums_in_float16(client: gradserve.Client, weight: float) -> None:
    acc = client.conditional_accumulator("float16", (1,), accumulate_dtype="float16")
    with pytest.raises(gradserve.InvalidArgumentError, match=r"from 2\^-14 to 2\^15 .* summed in float16"):
        acc.apply_grad([1], weight=weight)


@pytest.mark.parametrize("step", [INT64_MIN, -1, INT64_MAX - 1, INT64_MAX])
def test_extreme_steps(client: gradserve.Client, name: str, step: int) -> None:
    acc = client.conditional_accumulator("float32", (), name, keep_averages=3)
    acc.set_global_step(step)
    assert acc.info().global_step == step
    for local_step in (INT64_MIN, INT64_MAX, step):
        outcome = acc.apply_grad(1, local_step).outcome
        assert outcome is (gradserve.ACCEPTED if local_step >= step else gradserve.STALE)
    for _ in range(3):
        acc.apply_grad(1, INT64_MAX)
        assert acc.take_grad(1) == 1
        info = acc.info()
        assert INT64_MIN <= info.global_step <= INT64_MAX
        assert acc.read_average(info.global_step) == 1
    assert len(set(acc.info().kept_steps)) == 3
    acc.set_global_step(0)
    assert acc.apply_grad(1).outcome is gradserve.ACCEPTED
    acc.delete()


@pytest.mark.parametrize(
    "dims", [[INT64_MAX], [INT64_MAX] * 3, [-1] * 254, [0] * 254], ids=lambda dims: f"{len(dims)}x{dims[0]}"
)
@pytest.mark.parametrize("layout", [accumulator_pb2.LAYOUT_DENSE, accumulator_pb2.LAYOUT_SPARSE])
@pytest.mark.usefixtures("unchanged")
def test_absurd_shapes_of_accumulators(raw: RawCalls, name: str, dims: list[int], layout: Any) -> None:
    made = raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=spec(component(dims=dims, layout=layout))))
    assert list(made.info.spec.components[0].shape.dims) == dims
    part = dense(OK) if layout == accumulator_pb2.LAYOUT_DENSE else sparse([0, 1], (2, 3), [2, 3])
    failure = raw.fail("ApplyGradient", Apply(accumulator=ref(name), gradient=[part]))
    assert (failure.code, failure.message[:14]) == (INVALID, "Shape mismatch")
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("deadline", [None, 1e6])
@pytest.mark.parametrize("seconds", [315_576_000_000, INT64_MAX])
def test_absurd_times(raw: RawCalls, name: str, seconds: int, deadline: float | None) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=SPECS["any"]))
    long = Duration(seconds=seconds, nanos=(1 << 31) - 1)
    keep = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP, lease=long)
    fields: Any = {"accumulator": ref(name), "timeout": long, "placement": keep}
    reader = raw.start("ReadAverage", Read(**fields, step=1), timeout=deadline)
    taker = raw.start("TakeGradient", Take(**fields, num_required=2), timeout=deadline)
    eventually(lambda: state(raw)[2].num_waiters, lambda waiters: waiters == 2)
    raw.call("ApplyGradient", Apply(accumulator=ref(name), gradient=[dense(OK)]))
    raw.call("PushPull", PushPull(**fields, num_required=1, gradient=[dense(OK)]), timeout=deadline)
    handles = [
        reply_class.FromString(call.result()).average.components[0].dense.handle
        for reply_class, call in (
            (messages_pb2.ReadAverageResponse, reader),
            (messages_pb2.TakeGradientResponse, taker),
        )
    ]
    (stored,) = raw.call("PutTensors", header([1], lease=long), chunk(4)).tensors
    listed = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest()).tensors
    assert {*handles, stored.handle} <= {each.handle for each in listed}
    assert all(each.lease_remaining.seconds <= 86_400 for each in listed)
    everything = tensor_messages_pb2.DeleteTensorsRequest(handles=[each.handle for each in listed])
    assert raw.call("DeleteTensors", everything).num_deleted == 4
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


def repeated(message: Message) -> bytes:
    """Returns the bytes of a message, 200,000 times."""
    return message.SerializeToString() * 200_000


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("method", "first", "more", "message", "field"),
    [
        (
            "CreateAccumulator",
            Create(accumulator=ref("new")),
            repeated(Create(spec=spec(component()))),
            "expected at most 65536 components, got 200000",
            "spec.components",
        ),
        (
            "ApplyGradient",
            Apply(accumulator=ref("model"), request_id=identity(1)),
            repeated(Apply(gradient=[accumulator_pb2.ComponentGradient()])),
            "expected at most 65536 components, got 200000",
            "gradient",
        ),
        (
            "PushPull",
            PushPull(accumulator=ref("model"), num_required=1),
            repeated(PushPull(gradient=[dense({"handle": "x"})])),
            "expected at most 65536 components, got 200000",
            "gradient",
        ),
        (
            "GetTensors",
            tensor_messages_pb2.GetTensorsRequest(release=True),
            repeated(tensor_messages_pb2.GetTensorsRequest(handles=["x"])),
            "expected at most 131072 handles, got 200000",
            "handles",
        ),
        (
            "PutTensors",
            header([0]),
            repeated(header([1])),
            "expected at most 131072 tensors, got 200001",
            "header.tensors",
        ),
        (
            "ApplyGradient",
            Apply(accumulator=ref("any")),
            repeated(Apply(gradient=[dense({"handle": "x"})])),
            "expected at most 65536 components, got 200000",
            "gradient",
        ),
    ],
)
def test_too_many_of_something(
    server_address: str, raw: RawCalls, method: str, first: Message, more: bytes, message: str, field: str
) -> None:
    """Refused, and others are answered meanwhile or soon after."""
    request = first.SerializeToString() + more
    assert len(request) < 16 * MIB
    call = raw.start(method, request)
    with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as other:
        other.server_info()
    with pytest.raises(grpc.RpcError) as raised:
        list(call) if METHODS[method].server_streaming else call.result()
    failure = failure_of(raised.value)
    assert (failure.code, failure.message, failure.field) == (INVALID, message, field)


@pytest.mark.usefixtures("unchanged")
def test_a_message_that_is_too_long(raw: RawCalls) -> None:
    gradient = dense({"dtype": F32, "shape": [4 * MIB + 1], "content": bytes(16 * MIB + 4)})
    failure = raw.fail("ApplyGradient", Apply(accumulator=ref("any"), gradient=[gradient]))
    assert failure.code is EXHAUSTED
    assert re.search(rf"Received message larger than max \(\d+ vs\. {16 * MIB}\)", failure.message)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        bytes(range(256)) * 50,
    ],
    ids=["nothing", "HTTP/1.1", "zeros", "ones", "noise"],
)
def test_what_is_not_even_grpc(server_address: str, noise: bytes) -> None:
    host, _, port = server_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except TimeoutError:
            raise
        except OSError:
            pass  # The server may hang up at any point.
