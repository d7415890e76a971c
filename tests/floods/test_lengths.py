"""Names, ids and lists of any length are refused where they arrive, in words that stay short."""

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import (
    accumulator_pb2,
    fused_batch_norm_messages_pb2,
    lease_messages_pb2,
    tensor_messages_pb2,
)
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layer_messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import listed, quoted
from gradserve_server.rpc.accumulators.requests import decode_accumulator_spec, decode_gradient
from gradserve_server.tensors.payload import NO_PAYLOAD
from gradserve_testing import LocalServer
from tests.bad_input.layer_tables import config, create_request, named
from tests.bad_input.requests import (
    F32,
    INVALID,
    MIB,
    OK,
    Apply,
    Bad,
    Create,
    PushPull,
    Take,
    component,
    dense,
    identity,
    ref,
    sparse,
    spec,
    state,
)
from tests.bad_input.test_streams import header
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

LONG = "n" * MIB
MANY = MIB // 2
"""Numbers of a list that is parsed before it is refused; one with more than MIB is not."""
SHOWN_BYTES = 2100
"""The longest message: what `status` lets through, and its end."""


@pytest.fixture(scope="module")
def server_address() -> Iterator[str]:
    """A server of this file alone, as its use is compared."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        yield local.address


@pytest.fixture(scope="module")
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        yield calls


def too_long(method: str, request: Any, field: str, limit: int, num_bytes: int = MIB) -> Bad:
    return Bad(method, request, f"expected at most {limit} bytes, got {num_bytes}", field)


def too_many(method: str, request: Any, field: str, limit: int, what: str, given: int) -> Bad:
    return Bad(method, request, f"expected at most {limit} {what}, got {given}", field)


GRADIENT: Any = {"accumulator": ref("model"), "gradient": [dense(OK)]}

TOO_LONG = [
    too_long("CreateAccumulator", Create(accumulator=ref(LONG), spec=spec(component())), "accumulator.name", 1024),
    too_long("GetAccumulator", messages_pb2.GetAccumulatorRequest(accumulator=ref(LONG)), "accumulator.name", 1024),
    too_long(
        "DeleteAccumulator",
        messages_pb2.DeleteAccumulatorRequest(accumulator=ref("a", container=LONG)),
        "accumulator.container",
        1024,
    ),
    too_long(
        "CreateAccumulator",
        Create(accumulator=ref("a"), spec=spec(component("x"), component("\U0001f642" * 257))),
        "spec.components[1].name",
        1024,
        1028,
    ),
    too_long(
        "TakeGradient",
        Take(accumulator=ref("a", container=LONG), num_required=1),
        "accumulator.container",
        1024,
    ),
    too_long(
        "CreateAccumulator",
        Create(accumulator=ref("a"), spec=spec(component(), agreement={LONG: ""})),
        "spec.agreement",
        1024,
    ),
    Bad(
        "CreateAccumulator",
        Create(accumulator=ref("a"), spec=spec(component(), agreement={"n" * 1024: LONG})),
        f"agreement['{'n' * 100}'...]: expected at most 1024 bytes, got {MIB}",
        "spec.agreement",
    ),
    too_long("HoldClientLease", lease_messages_pb2.HoldClientLeaseRequest(client_id=LONG), "client_id", 128),
    Bad(
        "ListTensors",
        tensor_messages_pb2.ListTensorsRequest(page_token=LONG),
        f"expected the next_page_token of an earlier page, got '{'n' * 100}'...",
        "page_token",
    ),
    too_long("CreateBatchNormLayer", create_request(LONG), "layer.name", 1024),
    too_long("CreateBatchNormLayer", create_request("a", creation_id=LONG), "creation_id", 128),
    too_long("CreateBatchNormLayer", create_request("a", config=config(data_format=LONG)), "config.data_format", 1024),
    too_long(
        "CreateBatchNormLayer",
        create_request("a", config=config(param_initializers={"beta": named(name=LONG)})),
        "config.param_initializers[beta].named.name",
        1024,
    ),
    too_long(
        "CreateBatchNormLayer",
        create_request("a", config=config(renorm_clipping={LONG: 1.0})),
        "config.renorm_clipping",
        1024,
    ),
    too_long(
        "FusedBatchNorm",
        fused_batch_norm_messages_pb2.FusedBatchNormRequest(data_format=LONG),
        "data_format",
        1024,
    ),
    Bad(
        "CreateBatchNormLayer",
        create_request("a", input_dtype=F32, input_shape=[1] * MANY),
        f"expected a rank from 2 to 5, got {MANY} dimensions",
        "input_shape",
    ),
    too_many("PutTensors", header([1] * MANY), "header.tensors[0].shape", 64, "dimensions", MANY),
    too_many(
        "CreateAccumulator",
        Create(accumulator=ref("a"), spec=spec(component(dims=[-1] * 255))),
        "spec.components[0].shape.dims",
        254,
        "dimensions",
        255,
    ),
    Bad(
        "CreateAccumulator",
        Create(accumulator=ref("a"), spec=spec(*[component(str(i), dims=[1] * 254) for i in range(1033)])),
        "expected at most 262144 dimensions in all, got 262382",
        "spec.components",
    ),
    Bad(
        "CreateAccumulator",
        Create(
            accumulator=ref("a"),
            spec=spec(accumulator_pb2.ComponentSpec(dtype=F32, shape={"unknown_rank": True, "dims": [1] * 255})),
        ),
        "expected at most 254 dimensions, got 255",
        "spec.components[0].shape.dims",
    ),
]

BAD_SENDERS = [
    bad
    for method, request in (("ApplyGradient", Apply(**GRADIENT)), ("PushPull", PushPull(**GRADIENT, num_required=1)))
    for bad in (
        too_long(method, type(request)(**GRADIENT, worker_id=LONG), "worker_id", 256),
        too_long(method, type(request)(**GRADIENT, request_id=identity(1, LONG)), "request_id.client_id", 128),
        too_many(
            method,
            type(request)(accumulator=ref("model"), gradient=[sparse([0], (1, 2), [1] * MANY)]),
            "gradient[0].sparse.dense_shape.dims",
            254,
            "dimensions",
            MANY,
        ),
    )
]


@pytest.mark.parametrize("bad", [*TOO_LONG, *BAD_SENDERS], ids=lambda bad: f"{bad.method}-{bad.field}")
def test_what_is_too_long_is_refused_and_leaves_nothing(raw: RawCalls, bad: Bad) -> None:
    model = Create(accumulator=ref("model"), spec=spec(component(), keep_averages=2))
    raw.call("CreateAccumulator", model)
    before = state(raw)
    failure = raw.fail(bad.method, bad.request)
    bad.check(failure)
    assert len(failure.message) < SHOWN_BYTES
    assert state(raw) == before


LONG_ECHOES = [
    ("GetTensors", tensor_messages_pb2.GetTensorsRequest(handles=[LONG]), "no tensor with the handle 'nnn"),
    ("ApplyGradient", Apply(accumulator=ref("model"), gradient=[dense(OK, LONG)]), "expected components ['']"),
    (
        "BatchNormBackward",
        layer_messages_pb2.BatchNormBackwardRequest(layer={"name": LONG}),
        "expected at most 1024 bytes",
    ),
]


@pytest.mark.parametrize(("method", "request_", "message"), LONG_ECHOES, ids=lambda each: str(each)[:20])
def test_no_error_repeats_what_is_long(raw: RawCalls, method: str, request_: Any, message: str) -> None:
    raw.call("CreateAccumulator", Create(accumulator=ref("model"), spec=spec(component(), keep_averages=2)))
    failure = raw.fail(method, request_)
    assert message in failure.message
    assert len(failure.message) < 400


def test_differences_of_many_components_stay_short(raw: RawCalls, name: str) -> None:
    ours = [component(str(index), dims=[1]) for index in range(5000)]
    raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=spec(*ours)))
    theirs = [component(str(index), dims=[2]) for index in range(5000)]
    failure = raw.fail("CreateAccumulator", Create(accumulator=ref(name), spec=spec(*theirs)))
    assert "shape of component '0' is [1], not [2]" in failure.message
    assert failure.message.endswith("; and maybe more")
    others = [component(f"x{index}", dims=[1]) for index in range(5000)]
    failure = raw.fail("CreateAccumulator", Create(accumulator=ref(name), spec=spec(*others)))
    assert "'9' and 4990 more], not ['x0', 'x1'" in failure.message
    failure = raw.fail("ApplyGradient", Apply(accumulator=ref(name), gradient=[dense(OK, "0")]))
    assert failure.code is INVALID
    assert "and 4989 more" in failure.message
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


LONG_SHAPE = [1 << 40] * MIB

A_SPEC = spec(component(dims=LONG_SHAPE))
SOME_ROWS = Apply(gradient=[sparse([0], (1, 2), LONG_SHAPE)], request_id=identity(1))
A_STORED_TENSOR = Apply(gradient=[dense({"dtype": F32, "shape": LONG_SHAPE, "handle": "x"})], request_id=identity(1))
LONG_SHAPES: dict[str, Callable[[], object]] = {
    "of a component": lambda: decode_accumulator_spec(A_SPEC),
    "of rows": lambda: decode_gradient(SOME_ROWS, NO_PAYLOAD),
    "of a stored tensor": lambda: decode_gradient(A_STORED_TENSOR, NO_PAYLOAD)[2],
}


@pytest.mark.parametrize("decode", LONG_SHAPES.values(), ids=LONG_SHAPES)
def test_a_long_shape_is_neither_copied_nor_printed(decode: Any) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidArgumentError):  # That of a stored tensor is raised at its opening.
            decode()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "'a'"), ("a'b", '"a\'b"'), ("x" * 100, repr("x" * 100)), (LONG, f"'{'n' * 100}'...")]
)
def test_quoted(text: str, expected: str) -> None:
    assert quoted(text) == expected


def test_listed() -> None:
    assert listed(["b", "a"]) == "['b', 'a']"
    assert listed([]) == "[]"
    assert listed([str(index) for index in range(12)]).endswith("'8', '9' and 2 more]")
