"""What requests are made of, and what a bad one is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import (
    accumulator_pb2,
    parameters_messages_pb2,
    server_messages_pb2,
    tensor_messages_pb2,
    tensor_pb2,
)
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layer_messages_pb2
from tests.servers.raw_calls import METHODS, Failure, RawCalls

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

DEADLINE, OUT_OF_RANGE = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OUT_OF_RANGE

EXHAUSTED, ABORTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED

F32 = tensor_pb2.DATA_TYPE_FLOAT32

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

MIB = 1 << 20

OK = {"dtype": F32, "shape": [2, 3], "content": bytes(24)}

Create = messages_pb2.CreateAccumulatorRequest

Apply = messages_pb2.ApplyGradientRequest

Take = messages_pb2.TakeGradientRequest

Read = messages_pb2.ReadAverageRequest

PushPull = messages_pb2.PushPullRequest


def ref(name: str, **fields: Any) -> accumulator_pb2.AccumulatorRef:
    return accumulator_pb2.AccumulatorRef(name=name, **fields)


def tensor(array: Any, dtype: Any = np.float32) -> tensor_pb2.Tensor:
    given = np.asarray(array, dtype)
    return tensor_pb2.Tensor(dtype=to_data_type(given.dtype), shape=given.shape, content=given.tobytes())


def zeros(*shape: int) -> tensor_pb2.Tensor:
    return tensor(np.zeros(shape))


def dense(value: tensor_pb2.Tensor | dict[str, Any], name: str = "") -> accumulator_pb2.ComponentGradient:
    message = tensor_pb2.Tensor(**value) if isinstance(value, dict) else value
    return accumulator_pb2.ComponentGradient(name=name, dense=message)


def sparse(
    indices: Any, values: Any, dense_shape: Sequence[int] | None = None, name: str = ""
) -> accumulator_pb2.ComponentGradient:
    slices = accumulator_pb2.SparseGradient(
        indices=indices if isinstance(indices, tensor_pb2.Tensor) else tensor(indices, np.int64),
        values=values if isinstance(values, tensor_pb2.Tensor) else zeros(*values),
        dense_shape=None if dense_shape is None else accumulator_pb2.DenseShape(dims=dense_shape),
    )
    return accumulator_pb2.ComponentGradient(name=name, sparse=slices)


def component(
    name: str = "", dtype: Any = F32, dims: Sequence[int] | None = None, **fields: Any
) -> accumulator_pb2.ComponentSpec:
    shape = accumulator_pb2.PartialShape(unknown_rank=dims is None, dims=dims or ())
    return accumulator_pb2.ComponentSpec(name=name, dtype=dtype, shape=shape, **fields)


def spec(*components: accumulator_pb2.ComponentSpec, **fields: Any) -> accumulator_pb2.AccumulatorSpec:
    return accumulator_pb2.AccumulatorSpec(components=components, **fields)


def identity(sequence: int, client_id: str = "somebody") -> accumulator_pb2.RequestId:
    return accumulator_pb2.RequestId(client_id=client_id, sequence=sequence)


SPARSE: Any = {"layout": accumulator_pb2.LAYOUT_SPARSE}

SPECS = {
    "matrix": spec(component(dims=[-1, 3])),
    "begun": spec(component(dims=[-1, 3])),
    "any": spec(component()),
    "scalar": spec(component(dims=[])),
    "half": spec(component(dtype=tensor_pb2.DATA_TYPE_FLOAT16)),
    "rows": spec(component(dims=[2, 2, -1], **SPARSE)),
    "rows begun": spec(component(dims=[2, 2, -1], **SPARSE)),
    "any rows": spec(component(**SPARSE)),
    "model": spec(component("w", dims=[2]), component("e", dims=[-1, 2], **SPARSE)),
    "named": spec(component("only", dims=[2])),
    "ordered": spec(component(dims=[2, 3]), deterministic=True),
    "stepped": spec(component(dims=[2, 3])),
    "agreed": spec(component(), agreement={"workers": "3"}),
    "wide": spec(component(), accumulate_dtype=tensor_pb2.DATA_TYPE_FLOAT64),
}

BEGIN = {
    "begun": dense(zeros(2, 3)),
    "rows begun": sparse([0], (1, 2, 2, 2)),
}

USED = Apply(accumulator=ref("stepped"), request_id=identity(7), local_step=5, gradient=[dense(OK)], worker_id="w")


def state(raw: RawCalls) -> tuple[Any, ...]:
    """Returns all that requests could change, as far as it can be seen."""
    accumulators = _pages(raw, "ListAccumulators", messages_pb2.ListAccumulatorsRequest())
    layers = _pages(raw, "ListBatchNormLayers", layer_messages_pb2.ListBatchNormLayersRequest())
    tensors = raw.call("ListTensors", tensor_messages_pb2.ListTensorsRequest())
    parameters = _pages(raw, "ListParameters", parameters_messages_pb2.ListParametersRequest())
    return accumulators, [each.handle for each in tensors.tensors], usage(raw), layers, parameters


def _pages(raw: RawCalls, method: str, request: Any) -> list[Any]:
    """Returns all pages of a list: other tests may have left much on the server."""
    found = [raw.call(method, request)]
    while found[-1].next_page_token:
        request.page_token = found[-1].next_page_token
        found.append(raw.call(method, request))
    return found


def usage(raw: RawCalls) -> Any:
    """Returns how many there are of everything, and the memory that they take."""
    return raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).usage


def usage_in(seen: tuple[Any, ...]) -> Any:
    """Returns the same of a state."""
    return seen[2]


def check_field(path: str | None, method: str, request: Any) -> None:
    """Checks that a path leads to a field that the method's request has, and to an element that is there."""
    if path is None:
        return
    at: Descriptor | None = METHODS[method].input_type
    for segment in path.split("."):
        match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", segment)
        assert match, f"{segment!r} of {path!r} is neither a field nor an element"
        assert at is not None, f"{path!r} goes on beyond {match[1]!r}'s parent"
        assert match[1] in at.fields_by_name, f"{at.name} has no {match[1]!r}, as {path!r} says"
        field = at.fields_by_name[match[1]]
        value, at = getattr(request, match[1], None), field.message_type
        if match[2] is not None:
            assert field.is_repeated, f"{match[1]!r} of {path!r} has no elements"
            is_map = at is not None and at.GetOptions().map_entry
            key = match[2] if is_map else int(match[2])
            if value is not None:
                assert not is_map or key in value, f"{match[1]!r} has no {key!r}, as {path!r} says"
                value = value[key]
            if is_map and at is not None:
                at = at.fields_by_name["value"].message_type
        request = value


@dataclass(frozen=True)
class Bad:
    """A request, and how it must fail."""

    method: str
    request: Message
    message: str
    field: str | None = None
    code: grpc.StatusCode = INVALID

    def check(self, failure: Failure) -> None:
        assert failure.code is self.code, failure
        assert self.message in failure.message
        assert failure.field == self.field
        check_field(failure.field, self.method, self.request)


def bad_gradient(name: str, message: str, field: str | None, *parts: Any, **fields: Any) -> list[Bad]:
    """Returns a gradient that must be refused, as an apply and as a push_pull."""
    code = fields.pop("code", INVALID)
    apply = Apply(accumulator=ref(name), gradient=parts, **fields)
    push = PushPull(accumulator=ref(name), gradient=parts, num_required=1, **fields)
    return [Bad("ApplyGradient", apply, message, field, code), Bad("PushPull", push, message, field, code)]


DENSE, SHAPE = "gradient[0].dense", "gradient[0].dense.shape"

INDICES, VALUES = "gradient[0].sparse.indices", "gradient[0].sparse.values"
