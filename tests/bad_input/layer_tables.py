"""Bad calls of batch normalization layers."""

import math
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2
from tests.bad_input.requests import (
    ABORTED,
    EXHAUSTED,
    F32,
    INT64_MAX,
    INVALID,
    NOT_FOUND,
    Bad,
    tensor,
    zeros,
)

EXISTS = grpc.StatusCode.ALREADY_EXISTS
NAN, INF = math.nan, math.inf
X = zeros(4, 3)
NOBODY: Any = tensor_pb2.Tensor(handle="nobody")
SHORT = tensor_pb2.Tensor(dtype=F32, shape=[4, 3], content=bytes(47))
NEITHER: Any = tensor_pb2.Tensor()


def layer(name: str = "bn", **fields: Any) -> batch_norm_pb2.BatchNormLayerRef:
    return batch_norm_pb2.BatchNormLayerRef(name=name, **fields)


def config(**fields: Any) -> batch_norm_pb2.BatchNormConfig:
    return batch_norm_pb2.BatchNormConfig(**fields)


def named(**fields: Any) -> layer_pb2.Initializer:
    return layer_pb2.Initializer(named=layer_pb2.NamedInitializer(**fields))


def drawn(scale_min: float, scale_max: float, bias_min: float, bias_max: float) -> batch_norm_pb2.RandomAdjustment:
    return batch_norm_pb2.RandomAdjustment(
        scale_min=scale_min, scale_max=scale_max, bias_min=bias_min, bias_max=bias_max
    )


def create_request(name: str, **fields: Any) -> messages_pb2.CreateBatchNormLayerRequest:
    return messages_pb2.CreateBatchNormLayerRequest(layer=layer(name), **fields)


def forward_request(name: str, **fields: Any) -> messages_pb2.BatchNormForwardRequest:
    return messages_pb2.BatchNormForwardRequest(layer=layer(name), **{"inputs": X, **fields})


def backward_request(forward_id: str, **fields: Any) -> messages_pb2.BatchNormBackwardRequest:
    return messages_pb2.BatchNormBackwardRequest(
        layer=layer(), **{"forward_id": forward_id, "outputs_gradient": X, **fields}
    )


LAYER_CALLS: Sequence[tuple[str, Message]] = [
    # What there is when the bad calls come.
    ("CreateBatchNormLayer", create_request("bn", config=config(in_place_updates=True, scale=True))),
    ("BatchNormForward", forward_request("bn", forward_id="kept")),
    ("BatchNormForward", forward_request("bn", forward_id="spent")),
    ("BatchNormBackward", backward_request("spent")),
    ("CreateBatchNormLayer", create_request("new")),
    ("CreateBatchNormLayer", create_request("drawing", config=config(adjustment=drawn(1, 1, 0, 0)))),
    ("CreateBatchNormLayer", create_request("renorm", config=config(renorm=True))),
]


def create(
    message: str, field: str | None, code: grpc.StatusCode = INVALID, *, name: str = "other", **fields: Any
) -> Bad:
    return Bad("CreateBatchNormLayer", create_request(name, **fields), message, field, code)


def configured(message: str, field: str, **fields: Any) -> Bad:
    return create(message, f"config.{field}", config=config(**fields))


def built(
    message: str,
    field: str | None,
    shape: Sequence[int],
    dtype: Any = F32,
    code: grpc.StatusCode = INVALID,
    **fields: Any,
) -> Bad:
    return create(message, field, code, input_dtype=dtype, input_shape=shape, **fields)


def forward(message: str, field: str, code: grpc.StatusCode = INVALID, *, name: str = "bn", **fields: Any) -> Bad:
    return Bad("BatchNormForward", forward_request(name, **fields), message, field, code)


def backward(message: str, field: str, code: grpc.StatusCode = INVALID, forward_id: str = "kept", **fields: Any) -> Bad:
    return Bad("BatchNormBackward", backward_request(forward_id, **fields), message, field, code)


def set_variables(message: str, field: str, code: grpc.StatusCode = INVALID, **variables: tensor_pb2.Tensor) -> Bad:
    values = [layer_pb2.NamedTensor(name=name, tensor=value) for name, value in variables.items()]
    return Bad(
        "SetBatchNormVariables",
        messages_pb2.SetBatchNormVariablesRequest(layer=layer(), variables=values),
        message,
        field,
        code,
    )


def get_variables(message: str, field: str, name: str, *names: str) -> Bad:
    request = messages_pb2.GetBatchNormVariablesRequest(layer=layer(name), names=names)
    return Bad("GetBatchNormVariables", request, message, field, NOT_FOUND if "no variable" in message else INVALID)


def of_layer(method: str, ref: batch_norm_pb2.BatchNormLayerRef) -> Message:
    kind = getattr(messages_pb2, f"{method}Request")
    request: Message = kind(layer=ref)
    return request


NAMING = (
    "DescribeBatchNormLayer",
    "BatchNormForward",
    "BatchNormBackward",
    "ReleaseBatchNormForwards",
    "RunBatchNormUpdates",
    "GetBatchNormVariables",
    "SetBatchNormVariables",
)
LONG, MANY = "é" * 64 + "x", ["x"] * 100_000

BAD_LAYERS = [
    # Names
    *[
        Bad(method, of_layer(method, layer("")), "the name of a layer, got an empty one", "layer.name")
        for method in (*NAMING, "CreateBatchNormLayer", "DeleteBatchNormLayer")
    ],
    *[
        Bad(method, of_layer(method, ref), message, field, NOT_FOUND)
        for method in NAMING
        for ref, message, field in (
            (layer("nobody"), "no layer 'default/nobody'", "layer.name"),
            (layer("bn", container="elsewhere"), "no layer 'elsewhere/bn'", "layer.name"),
            (layer("bn", incarnation="first"), "'default/bn' was deleted", "layer.incarnation"),
        )
    ],
    # Reuse
    create("expected a known reuse, got 9", "reuse", reuse=9),
    create("there is no layer 'default/other'", "layer.name", NOT_FOUND, reuse=layer_pb2.LAYER_REUSE_REQUIRED),
    create("Variable bn/beta already exists", "layer.name", EXISTS, name="bn", reuse=layer_pb2.LAYER_REUSE_FORBIDDEN),
    create("configuration: scale is True, not False; in_place_updates is True", "config", EXISTS, name="bn"),
    # Numbers
    *[
        configured(f"expected a decay from 0 to 1, got {value:g}", "decay", decay=value)
        for value in (NAN, INF, -INF, 2)
    ],
    configured("expected a renorm_decay from 0 to 1, got nan", "renorm_decay", renorm_decay=NAN),
    *[configured(f"a finite epsilon, got {value}", "epsilon", epsilon=value) for value in (NAN, INF, -INF)],
    configured("a number as dmax, got nan", "renorm_clipping[dmax]", renorm=True, renorm_clipping={"dmax": NAN}),
    configured("argument: rmid.", "renorm_clipping", renorm=True, renorm_clipping={"rmid": 1.0, "rmax": 1.0}),
    *[
        configured("finite bounds scale_min <= scale_max", "adjustment.scale_min", adjustment=drawn(low, high, 0, 0))
        for low, high in ((NAN, 1), (0, NAN), (-INF, 0), (0, INF), (1, 0))
    ],
    configured("finite bounds bias_min <= bias_max", "adjustment.bias_min", adjustment=drawn(0, 0, 1, -1)),
    # Words
    configured("data_format has to be either NCHW or NHWC. Got 'nchw'", "data_format", data_format="nchw"),
    configured('"gelu", "swish", got "RELU"', "activation_fn", activation_fn="RELU"),
    configured(
        "expected no updates_collections with in_place_updates, got u",
        "updates_collections",
        in_place_updates=True,
        updates_collections=["u"],
    ),
    configured("got updates_collections", "updates_collections", renorm=True, updates_collections=["u"]),
    configured("got updates_collections", "updates_collections", renorm=True, in_place_updates=True),
    # Initializers
    *[
        configured(message, f"param_initializers[beta]{rest}", param_initializers={"beta": initializer})
        for message, rest, initializer in (
            ("expected a tensor or a named initializer, got neither", "", layer_pb2.Initializer()),
            ("an initializer out of zeros, ones", ".named.name", named()),
            ("an initializer out of zeros, ones", ".named.name", named(name="Zeros")),
            ("zeros has no parameter stddev", ".named.stddev", named(name="zeros", stddev=1)),
            ("expected a finite mean, got nan", ".named.mean", named(name="normal", mean=NAN)),
            ("expected a stddev of at least 0, got -1", ".named.stddev", named(name="normal", stddev=-1)),
            ("expected minval <= maxval, got 2 and 1", ".named.minval", named(name="uniform", minval=2)),
            ("ones is not random", ".named.seed", named(name="ones", seed=1)),
            ("expected content or a handle", ".tensor", layer_pb2.Initializer(tensor=NEITHER)),
            ("expected 48 bytes", ".tensor.content", layer_pb2.Initializer(tensor=SHORT)),
            ("float32 of shape [1, 3]", ".tensor", layer_pb2.Initializer(tensor=zeros(1, 3))),
            ("expected real numbers", ".tensor", layer_pb2.Initializer(tensor=tensor([1j], np.complex64))),
        )
    ],
    create(
        "no tensor with the handle 'nobody'",
        "config.param_initializers[beta].tensor.handle",
        NOT_FOUND,
        config=config(param_initializers={"beta": layer_pb2.Initializer(tensor=NOBODY)}),
    ),
    # Regularizers
    *[
        configured(message, f"param_regularizers[gamma]{rest}", param_regularizers={"gamma": regularizer})
        for message, rest, regularizer in (
            ("expected a regularizer out of l1, l2, l1_l2, got ''", ".name", layer_pb2.Regularizer()),
            ("l2 has no scale l1; it takes l2", ".l1", layer_pb2.Regularizer(name="l2", l1=1, l2=1)),
            ("expected a scale l1 for the regularizer l1, got none", "", layer_pb2.Regularizer(name="l1")),
            ("Setting a scale less than 0 on a regularizer: -1", ".l2", layer_pb2.Regularizer(name="l2", l2=-1)),
            ("expected a finite l1", ".l1", layer_pb2.Regularizer(name="l1", l1=NAN)),
            ("expected a finite l1", ".l1", layer_pb2.Regularizer(name="l1_l2", l1=INF)),
        )
    ],
    # Huge counts
    configured("at most 1024 entries, got 100000", "updates_collections", updates_collections=MANY),
    configured("at most 1024 entries, got 100000", "outputs_collections", outputs_collections=MANY),
    *[
        configured("at most 1024 entries, got 2000", field, **{field: {str(number): value for number in range(2000)}})
        for field, value in (
            ("param_initializers", named(name="zeros")),
            ("param_regularizers", layer_pb2.Regularizer(name="l1", l1=1)),
            ("variables_collections", layer_pb2.CollectionNames(names=["x"])),
            ("renorm_clipping", 1.0),
        )
    ],
    # Variables created at once
    built("expected a known DataType, got 0", "input_dtype", [4, 3], dtype=0),
    built("a dtype out of half, bfloat16, float, double, got int32", "input_dtype", [4, 3], tensor_pb2.DATA_TYPE_INT32),
    built("expected a rank from 2 to 5, got shape []", "input_shape", []),
    built("expected a rank from 2 to 5, got shape [3]", "input_shape", [3]),
    built("expected a rank from 2 to 5", "input_shape", [1] * 10_000),
    built("the number of channels as size 1 of input_shape, got [4, -1]", "input_shape", [4, -1]),
    built("sizes of at least 0, or -1 for any, got [-2, 3]", "input_shape", [-2, 3]),
    *[
        built("too many bytes of tensor memory", None, [-1, channels], code=EXHAUSTED)
        for channels in (1 << 40, 1 << 62, INT64_MAX)
    ],
    built(
        "Too many elements provided. Takes 2",
        "config.param_initializers[beta]",
        [4, 2],
        config=config(param_initializers={"beta": layer_pb2.Initializer(tensor=zeros(3))}),
    ),
    # Inputs
    forward("expected a rank from 2 to 5, got shape []", "inputs", inputs=tensor(0)),
    forward("expected a rank from 2 to 5, got shape [3]", "inputs", inputs=zeros(3)),
    forward("expected a rank from 2 to 5", "inputs", inputs=zeros(1, 1, 1, 1, 1, 3)),
    forward("got int32", "inputs", inputs=tensor(np.zeros((4, 3)), np.int32)),
    forward("specified shape (4,) and found shape (3,)", "inputs", inputs=zeros(3, 4)),
    forward("DataType float64 not in list", "inputs", inputs=tensor(np.zeros((4, 3)), np.float64)),
    forward("specified dtype float64", "inputs", inputs=tensor(np.zeros((4, 2, 3)), np.float64)),
    *[
        forward("expected content or a handle, got neither", name, **{name: NEITHER})
        for name in ("inputs", "batch_weights", "adjustment_scale", "adjustment_bias")
    ],
    *[
        forward("no tensor with the handle 'nobody'", f"{name}.handle", NOT_FOUND, **{name: NOBODY})
        for name in ("inputs", "batch_weights", "adjustment_scale", "adjustment_bias")
    ],
    forward("expected 48 bytes for shape [4, 3] of float32, got 47", "inputs.content", inputs=SHORT),
    forward("Shapes (4,) and (3,) are incompatible", "batch_weights", batch_weights=zeros(3)),
    forward("Shapes (4,) and (4, 1) are incompatible", "batch_weights", batch_weights=zeros(4, 1)),
    forward("got complex64", "batch_weights", batch_weights=tensor(np.zeros(4), np.complex64)),
    forward("batch_weights, updates_coll", "batch_weights", name="renorm", batch_weights=zeros(4)),
    forward("or none of them; got one", "adjustment_scale", adjustment_bias=zeros(3)),
    forward("or none of them; got one", "adjustment_bias", adjustment_scale=zeros(3)),
    forward("[4, 3], got [4]", "adjustment_scale", adjustment_scale=zeros(4), adjustment_bias=zeros(4)),
    forward("[4, 3], got [2, 4, 3]", "adjustment_bias", adjustment_scale=zeros(3), adjustment_bias=zeros(2, 4, 3)),
    forward(
        "got int64",
        "adjustment_scale",
        name="new",
        adjustment_scale=tensor([1], np.int64),
        adjustment_bias=tensor([1], np.int64),
    ),
    forward("the layer draws one itself", "adjustment_scale", name="drawing", adjustment_scale=X, adjustment_bias=X),
    # Options of calls
    forward("expected at most 128 bytes, got 129", "forward_id", forward_id=LONG),
    forward("expected at most 65536 forwards, got 100000", "released_forward_ids", released_forward_ids=MANY),
    forward("expected a known placement mode, got 9", "placement.mode", placement={"mode": 9}),
    forward("expected a positive lease, got -1 s", "placement.lease", placement={"lease": {"seconds": -1}}),
    forward("expected a positive lease, got -1 s", "lease", lease={"seconds": -1}),
    forward("expected a positive lease, got 0 s", "lease", name="new", lease={}),
    # Gradients
    backward("no forward 'nobody' is kept", "forward_id", NOT_FOUND, "nobody"),
    backward("no forward '' is kept", "forward_id", NOT_FOUND, ""),
    backward("were computed already", "forward_id", ABORTED, "spent"),
    backward("float32 [4, 3], got float32 [3, 4]", "outputs_gradient", outputs_gradient=zeros(3, 4)),
    backward("float32 [4, 3], got float16", "outputs_gradient", outputs_gradient=tensor(np.zeros((4, 3)), np.float16)),
    backward("expected content or a handle, got neither", "outputs_gradient", outputs_gradient=NEITHER),
    backward("expected 48 bytes", "outputs_gradient.content", outputs_gradient=SHORT),
    backward("handle 'nobody'", "outputs_gradient.handle", NOT_FOUND, outputs_gradient=NOBODY),
    backward("expected a known placement mode, got -1", "placement.mode", placement={"mode": -1}),
    backward("expected a positive lease", "placement.lease", placement={"lease": {"nanos": -1}}),
    # Forwards that are named
    Bad(
        "ReleaseBatchNormForwards",
        messages_pb2.ReleaseBatchNormForwardsRequest(layer=layer(), forward_ids=MANY),
        "expected at most 65536 forwards, got 100000",
        "forward_ids",
    ),
    Bad(
        "RunBatchNormUpdates",
        messages_pb2.RunBatchNormUpdatesRequest(layer=layer(), forward_ids=MANY),
        "expected at most 65536 forwards, got 100000",
        "forward_ids",
    ),
    Bad(
        "RunBatchNormUpdates",
        messages_pb2.RunBatchNormUpdatesRequest(),
        "the name of a layer, got an empty one",
        "layer.name",
    ),
    Bad(
        "RunBatchNormUpdates",
        messages_pb2.RunBatchNormUpdatesRequest(collection=layer_pb2.LayerCollectionRef()),
        "expected the name of a collection, got an empty one",
        "collection.name",
    ),
    # Variables
    get_variables("has no variable 'delta'; it has beta, gamma", "names[1]", "bn", "beta", "delta"),
    get_variables("has no variable 'delta'", "names[2]", "bn", "beta", "beta", "delta"),
    get_variables("has no variable 'beta'; its variables are created by the first", "names[0]", "new", "beta"),
    get_variables("expected at most 1024 names, got 100000", "names", "bn", *MANY),
    set_variables("expected at least one variable, got none", "variables"),
    set_variables("has no variable 'delta'", "variables[1].name", NOT_FOUND, beta=zeros(3), delta=zeros(3)),
    set_variables("float32 of shape [3] for gamma", "variables[1].tensor", beta=zeros(3), gamma=zeros(4)),
    set_variables("for beta, got float64", "variables[0].tensor", beta=tensor(np.ones(3), np.float64)),
    set_variables("expected content or a handle", "variables[0].tensor", beta=NEITHER),
    set_variables("handle 'nobody'", "variables[1].tensor.handle", NOT_FOUND, gamma=zeros(3), beta=NOBODY),
    Bad(
        "SetBatchNormVariables",
        messages_pb2.SetBatchNormVariablesRequest(layer=layer(), variables=[{"name": "beta", "tensor": zeros(3)}] * 2),
        "expected each variable once, got 'beta' twice",
        "variables[1].name",
    ),
    # Pages
    Bad("ListBatchNormLayers", messages_pb2.ListBatchNormLayersRequest(page_token="x"), "page_token", "page_token"),
    Bad("ListBatchNormLayers", messages_pb2.ListBatchNormLayersRequest(page_size=-1), "page_size", "page_size"),
]
