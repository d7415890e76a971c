"""Bad waits, names, specs, pages and reads."""

import base64
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_messages_pb2, tensor_pb2
from tests.bad_input.requests import (
    DEADLINE,
    F32,
    INT64_MAX,
    INT64_MIN,
    INVALID,
    MIB,
    NOT_FOUND,
    OK,
    OUT_OF_RANGE,
    SPARSE,
    Bad,
    Create,
    PushPull,
    Read,
    Take,
    component,
    dense,
    identity,
    ref,
    spec,
)

PLACEMENT: Any = {"num_required": 1, "placement": tensor_pb2.Placement(mode=99)}  # type: ignore[arg-type]  # unknown


def lease(seconds: int, nanos: int = 0) -> Any:
    return {"num_required": 1, "placement": tensor_pb2.Placement(lease=Duration(seconds=seconds, nanos=nanos))}


def bad_wait(message: str, field: str, **fields: Any) -> list[Bad]:
    """Returns a request that must be refused, as all that wait."""
    only_num_required = set(fields) == {"num_required"}
    take = Take(accumulator=ref("begun"), **fields)
    push = PushPull(accumulator=ref("begun"), gradient=[dense(OK)], **fields)
    bad = [Bad("TakeGradient", take, message, field), Bad("PushPull", push, message, field)]
    if not only_num_required:
        rest = {name: value for name, value in fields.items() if name != "num_required"}
        bad.append(Bad("ReadAverage", Read(accumulator=ref("begun"), **rest), message, field))
    return bad


BAD_WAITS = [
    *bad_wait("Argument num_required must be positive, but was 0", "num_required", num_required=0),
    *bad_wait("Argument num_required must be positive, but was -1", "num_required", num_required=-1),
    *bad_wait(f"must be positive, but was {-(1 << 31)}", "num_required", num_required=-(1 << 31)),
    *bad_wait("expected a known placement mode, got 99", "placement.mode", **PLACEMENT),
    *bad_wait("expected a positive lease, got 0 s", "placement.lease", **lease(0)),
    *bad_wait("expected a positive lease, got -1 s", "placement.lease", **lease(-1)),
    *bad_wait("expected a positive lease, got -9.22337e+18 s", "placement.lease", **lease(INT64_MIN)),
    *bad_wait("expected a timeout of at least 0, got -1 s", "timeout", num_required=1, timeout=Duration(seconds=-1)),
    *bad_wait("expected a timeout of at least 0", "timeout", num_required=1, timeout=Duration(nanos=-1)),
    *bad_wait("expected a timeout of at least 0", "timeout", num_required=1, timeout=Duration(seconds=INT64_MIN)),
    Bad(
        "TakeGradient",
        Take(accumulator=ref("begun"), num_required=1, request_id=identity(1, "")),
        "expected a client_id, got an empty one",
        "request_id.client_id",
    ),
    Bad(
        "TakeGradient",
        Take(accumulator=ref("begun"), num_required=(1 << 31) - 1, timeout=Duration()),
        "accumulator 'default/begun' did not get the 2147483647 gradients required within 0 s: 1 gradient is in",
        code=DEADLINE,
    ),
    Bad(
        "ReadAverage",
        Read(accumulator=ref("begun"), step=INT64_MAX, timeout=Duration()),
        f"the average of step {INT64_MAX} of accumulator 'default/begun' did not arrive within 0 s: 1 gradient is in",
        code=DEADLINE,
    ),
    *(
        Bad(
            "ReadAverage",
            Read(accumulator=ref("begun"), step=step),
            f"no average of step {step} is kept",
            "step",
            OUT_OF_RANGE,
        )
        for step in (0, -1, INT64_MIN)
    ),
    Bad("ReadAverage", Read(accumulator=ref("stepped"), step=5), "the kept steps (1)", "step", OUT_OF_RANGE),
]

NAMED = {
    "GetAccumulator": messages_pb2.GetAccumulatorRequest,
    "DeleteAccumulator": messages_pb2.DeleteAccumulatorRequest,
    "GetNumAccumulated": messages_pb2.GetNumAccumulatedRequest,
    "SetGlobalStep": messages_pb2.SetGlobalStepRequest,
    "TakeGradient": Take,
    "ReadAverage": Read,
}

UNKNOWN = [
    bad
    for method, request in NAMED.items()
    for bad in (
        Bad(method, request(), "expected the name of an accumulator, got an empty one", "accumulator.name"),
        Bad(method, request(accumulator=ref("")), "expected the name of an accumulator", "accumulator.name"),
        *(
            ()
            if method == "DeleteAccumulator"  # To delete what is not there is no error.
            else (
                Bad(
                    method, request(accumulator=ref("no")), "no accumulator 'default/no'", "accumulator.name", NOT_FOUND
                ),
                Bad(
                    method,
                    request(accumulator=ref("matrix", container="c")),
                    "no accumulator 'c/matrix'",
                    "accumulator.name",
                    NOT_FOUND,
                ),
                Bad(
                    method,
                    request(accumulator=ref("matrix", incarnation="earlier")),
                    "accumulator 'default/matrix' was deleted; another one has this name now",
                    "accumulator.incarnation",
                    NOT_FOUND,
                ),
                Bad(method, request(accumulator=ref("🙂" * 256)), "no accumulator", "accumulator.name", NOT_FOUND),
            )
        ),
    )
]


def bad_spec(message: str, field: str, *components: Any, name: str = "new", **fields: Any) -> Bad:
    code = fields.pop("code", INVALID)
    return Bad(
        "CreateAccumulator", Create(accumulator=ref(name), spec=spec(*components, **fields)), message, field, code
    )


FIRST = "spec.components[0]"

BAD_SPECS = [
    bad_spec("expected the name of an accumulator", "accumulator.name", component(), name=""),
    bad_spec("expected at least one component, got none", "spec.components"),
    Bad("CreateAccumulator", Create(accumulator=ref("new")), "expected at least one component", "spec.components"),
    bad_spec(
        "expected distinct component names, got 'a' twice", "spec.components[1].name", component("a"), component("a")
    ),
    bad_spec("expected a name for each of several components", f"{FIRST}.name", component(), component("a")),
    bad_spec("expected a name for each of several components", "spec.components[1].name", component("a"), component()),
    bad_spec("expected a known DataType, got 0", f"{FIRST}.dtype", component(dtype=0)),
    bad_spec("expected a known DataType, got 99", f"{FIRST}.dtype", component(dtype=99)),
    *(
        bad_spec(
            "expected a dtype out of float16, bfloat16, float32, float64, got", f"{FIRST}.dtype", component(dtype=dtype)
        )
        for dtype in set(tensor_pb2.DataType.values()) - {0, 1, 2, 3, 4}
    ),
    bad_spec("expected dimensions of at least -1, got -2", f"{FIRST}.shape.dims", component(dims=[3, -2])),
    bad_spec(
        "component 'b': expected dimensions of at least -1, got -2",
        "spec.components[1].shape.dims",
        component("a"),
        component("b", dims=[3, -2]),
    ),
    bad_spec(
        "component 'b': expected a known DataType, got 99",
        "spec.components[1].dtype",
        component("a"),
        component("b", 99),
    ),
    bad_spec("component 'a': expected a dtype out of", f"{FIRST}.dtype", component("a", tensor_pb2.DATA_TYPE_INT8)),
    bad_spec(
        f"expected dimensions of at least -1, got {INT64_MIN}", f"{FIRST}.shape.dims", component(dims=[INT64_MIN])
    ),
    bad_spec(
        "expected no dims with unknown_rank, got [1]",
        f"{FIRST}.shape.dims",
        accumulator_pb2.ComponentSpec(dtype=F32, shape=accumulator_pb2.PartialShape(unknown_rank=True, dims=[1])),
    ),
    bad_spec("expected a known layout, got 99", f"{FIRST}.layout", component(layout=99)),
    bad_spec("expected a known reduction, got 99", "spec.reduction", component(), reduction=99),
    bad_spec("expected a known reduction, got -1", "spec.reduction", component(), reduction=-1),
    bad_spec("expected a known DataType, got 99", "spec.accumulate_dtype", component(), accumulate_dtype=99),
    bad_spec(
        "expected an accumulate_dtype that holds every float32, got float16",
        "spec.accumulate_dtype",
        component(),
        accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT16,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every bfloat16, got float16",
        "spec.accumulate_dtype",
        component(dtype=tensor_pb2.DATA_TYPE_BFLOAT16),
        accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT16,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every float64, got float32",
        "spec.accumulate_dtype",
        component("a"),
        component("b", dtype=tensor_pb2.DATA_TYPE_FLOAT64),
        accumulate_dtype=F32,
    ),
    bad_spec(
        "expected an accumulate_dtype that holds every float32, got complex64",
        "spec.accumulate_dtype",
        component(),
        accumulate_dtype=tensor_pb2.DATA_TYPE_COMPLEX64,
    ),
    bad_spec("expected keep_averages of at least 1, got -1", "spec.keep_averages", component(), keep_averages=-1),
    bad_spec("expected keep_averages of at least 1", "spec.keep_averages", component(), keep_averages=-(1 << 31)),
    bad_spec(
        "expected at most 64 entries, got 65",
        "spec.agreement",
        component(),
        agreement={str(number): "" for number in range(65)},
    ),
    bad_spec(
        "expected a name for each entry, got an empty one with the value 'x'",
        "spec.agreement",
        component(),
        agreement={"": "x"},
    ),
]


def other_spec(name: str, message: str, *components: Any, **fields: Any) -> Bad:
    return bad_spec(message, "spec", *components, name=name, code=grpc.StatusCode.ALREADY_EXISTS, **fields)


TAKEN_NAMES = [
    other_spec("matrix", "exists with another spec: reduction is MEAN, not SUM", component(dims=[-1, 3]), reduction=2),
    other_spec("matrix", "dtype of component '' is float32, not float64", component(dims=[-1, 3], dtype=4)),
    other_spec("matrix", "shape of component '' is [?,3], not [2,3]", component(dims=[2, 3])),
    other_spec("matrix", "shape of component '' is [?,3], not <unknown>", component()),
    other_spec("matrix", "shape of component '' is [?,3], not []", component(dims=[])),
    other_spec("matrix", "layout of component '' is DENSE, not SPARSE", component(dims=[-1, 3], **SPARSE)),
    other_spec("matrix", "deterministic is False, not True", component(dims=[-1, 3]), deterministic=True),
    other_spec("matrix", "keep_averages is 1, not 2", component(dims=[-1, 3]), keep_averages=2),
    other_spec("matrix", "accumulate_dtype is None, not float64", component(dims=[-1, 3]), accumulate_dtype=4),
    other_spec("wide", "accumulate_dtype is float64, not None", component()),
    other_spec("matrix", "agreement['run'] is absent, not ''", component(dims=[-1, 3]), agreement={"run": ""}),
    other_spec("agreed", "agreement['workers'] is '3', not '4'", component(), agreement={"workers": "4"}),
    other_spec("agreed", "exists with another spec: agreement['workers'] is '3', not absent", component()),
    other_spec("matrix", "components are [''], not ['x']", component("x", dims=[-1, 3])),
    other_spec("model", "components are ['w', 'e'], not ['w']", component("w", dims=[2])),
    other_spec(
        "matrix",
        "accumulator 'default/matrix' exists with another spec: reduction is MEAN, not SUM; keep_averages is 1, not 9; "
        "dtype of component '' is float32, not float16; shape of component '' is [?,3], not []; "
        "layout of component '' is DENSE, not SPARSE",
        component(dims=[], dtype=1, **SPARSE),
        reduction=2,
        keep_averages=9,
    ),
]


def token(text: str | bytes) -> str:
    return base64.urlsafe_b64encode(text.encode() if isinstance(text, str) else text).decode()


def bad_page(message: str, field: str, *, for_accumulators: bool = True, **fields: Any) -> list[Bad]:
    bad = [Bad("ListTensors", tensor_messages_pb2.ListTensorsRequest(**fields), message, field)]
    if for_accumulators:
        bad.append(Bad("ListAccumulators", messages_pb2.ListAccumulatorsRequest(**fields), message, field))
    return bad


TOKEN = "expected the next_page_token of an earlier page, got "

BAD_PAGES = [
    *bad_page("expected a page_size of at least 0, got -1", "page_size", page_size=-1),
    *bad_page("expected a page_size of at least 0", "page_size", page_size=-(1 << 31)),
    *bad_page(f"{TOKEN}'x'", "page_token", page_token="x"),
    *bad_page(f"{TOKEN}'===='", "page_token", page_token="===="),
    *bad_page(f"{TOKEN}'a b c'", "page_token", page_token="a b c"),
    *bad_page(f"{TOKEN}'ééé'", "page_token", page_token="ééé"),
    *bad_page(TOKEN, "page_token", page_token=token(b"\xff\xfe")),
    *bad_page(TOKEN, "page_token", page_token="\0" * 1000),
    *bad_page(TOKEN, "page_token", page_token="x" * (MIB + 1)),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("name")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("-1")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("1.5")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("²")),
    *bad_page(TOKEN, "page_token", for_accumulators=False, page_token=token("9" * 5000)),
]

BAD_READS = [
    Bad("GetTensors", tensor_messages_pb2.GetTensorsRequest(), "expected at least one handle, got none", "handles"),
    Bad(
        "GetTensors",
        tensor_messages_pb2.GetTensorsRequest(handles=["nobody"], release=True),
        "no tensor with the handle 'nobody'",
        "handles[0]",
        NOT_FOUND,
    ),
    Bad("GetTensors", tensor_messages_pb2.GetTensorsRequest(handles=[""]), "the handle ''", "handles[0]", NOT_FOUND),
    Bad(
        "GetTensors",
        tensor_messages_pb2.GetTensorsRequest(handles=["\0" * MIB] * 2),
        "no tensor with the handle",
        "handles[0]",
        NOT_FOUND,
    ),
]
