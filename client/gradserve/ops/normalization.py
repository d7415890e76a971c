"""The ops of batch and layer normalization.

TensorFlow has FusedBatchNorm and its gradient in three versions: the older two are views of the newest. LayerNorm and
its gradient are PyTorch's, because TensorFlow has no such ops.

"""

from dataclasses import replace
from typing import Annotated, Generic, NamedTuple

from gradserve.ops.declaration import FLOAT32, Attribute, Field, Input, Op, SameAs, StatisticsOf
from gradserve.results import TensorT_co
from gradserve_protocol.printing import abbreviated
from gradserve_protocol.v1 import fused_batch_norm_messages_pb2, layer_norm_messages_pb2

_GROUPED = Input("x", FLOAT32, "T, any shape that ends with S; the shape S itself makes one group.")
_X = Input("x", FLOAT32, "float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.")
_IMAGES = replace(_X, doc="float16, bfloat16, float32 or float64, of rank 4.")
_FLOAT_IMAGES = replace(_X, doc="float32, of rank 4.", allowed_dtypes=("float",))
_EPSILON = Attribute("epsilon", "float", "Added to the variance.", 0.0001)
_DATA_FORMAT = Attribute("data_format", "str", '"NHWC", "NCHW", "NDHWC" or "NCDHW".', "NHWC")
_FORMAT_OF_IMAGES = replace(_DATA_FORMAT, doc='"NHWC" or "NCHW".', allowed=("NHWC", "NCHW"))
_IS_TRAINING = Attribute(
    "is_training", "bool", "Whether to normalise by the moments of x, or by `mean` and `variance`.", True
)
_AS_IN_FORWARD = "As in the forward call."


_T, _U = SameAs("x"), StatisticsOf("x")
_LAYER_SCALE = Input("scale", _U, "U, shape S.")


@abbreviated
class LayerNormOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of LayerNorm; see `RawOps.LayerNorm`."""

    y: Annotated[TensorT_co, "T, the shape of x: (x - mean) rstd scale + offset."]
    mean: Annotated[TensorT_co, "U, the shape of x without the dimensions of S."]
    rstd: Annotated[TensorT_co, "U, the shape of mean: 1 / sqrt(variance + epsilon), with the population variance."]


@abbreviated
class LayerNormGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of LayerNormGrad; see `RawOps.LayerNormGrad`."""

    x_backprop: Annotated[TensorT_co, "T, the shape of x."]
    scale_backprop: Annotated[TensorT_co, "U, shape S."]
    offset_backprop: Annotated[TensorT_co, "U, shape S."]


LAYER_NORM = Op(
    name="LayerNorm",
    request=layer_norm_messages_pb2.LayerNormRequest,
    summary="Normalizes each group of elements of x, as PyTorch's native_layer_norm does.",
    text="""
    In the following, T is the dtype of x: float16, bfloat16, float32 or float64. U is float32, or float64 if T
    is. S is the shape of scale, with at least one dimension. A group is all elements of x with the same indices
    in the dimensions before S.
    """,
    arguments=(
        _GROUPED,
        _LAYER_SCALE,
        Input("offset", _U, "U, shape S."),
        Attribute("epsilon", "float", "Added to the variance.", 0.00001),
    ),
    outputs=LayerNormOutputs,
)

LAYER_NORM_GRAD = Op(
    name="LayerNormGrad",
    request=layer_norm_messages_pb2.LayerNormGradRequest,
    summary="Computes the gradients of LayerNorm with respect to x, scale and offset.",
    text="T, U and S are as in `LayerNorm`.",
    arguments=(
        Input("y_backprop", _T, "T, the shape of x: the gradient with respect to y."),
        replace(_GROUPED, doc="T, as in the forward call."),
        replace(_LAYER_SCALE, doc="U, shape S, as in the forward call."),
        Input("mean", _U, "U: the forward call's mean."),
        Input("rstd", _U, "U: the forward call's rstd."),
    ),
    outputs=LayerNormGradOutputs,
)
_SCALE = Input("scale", _U, "U, shape [C].")


@abbreviated
class FusedBatchNormOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNorm and FusedBatchNormV2; see `RawOps.FusedBatchNormV3`."""

    y: TensorT_co
    batch_mean: TensorT_co
    batch_variance: TensorT_co
    reserve_space_1: TensorT_co
    reserve_space_2: TensorT_co


@abbreviated
class FusedBatchNormV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormV3; see `RawOps.FusedBatchNormV3`."""

    y: Annotated[TensorT_co, "T, the shape of x."]
    batch_mean: Annotated[
        TensorT_co, "U, shape [C]: in training (1 - f) mean + f mu, with mu the mean of x; else `mean`."
    ]
    batch_variance: Annotated[
        TensorT_co,
        "U, shape [C]: in training (1 - f) variance + f var M / max(M - 1, 1), with var the population variance of x; "
        "else `variance`.",
    ]
    reserve_space_1: Annotated[TensorT_co, "U, shape [C]: in training mu, else 0."]
    reserve_space_2: Annotated[TensorT_co, "U, shape [C]: in training var, else 0."]
    reserve_space_3: Annotated[TensorT_co, "U, a scalar: 0."]


@abbreviated
class FusedBatchNormGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormGrad and FusedBatchNormGradV2; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: TensorT_co
    scale_backprop: TensorT_co
    offset_backprop: TensorT_co
    # The placeholders had other numbers before reserve_space_3 became an input.
    reserve_space_3: Annotated[TensorT_co, Field("reserve_space_4"), "U, shape [0]: a placeholder."]
    reserve_space_4: Annotated[TensorT_co, Field("reserve_space_5"), "U, shape [0]: a placeholder."]


@abbreviated
class FusedBatchNormGradV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of FusedBatchNormGradV3; see `RawOps.FusedBatchNormGradV3`."""

    x_backprop: Annotated[TensorT_co, "T, the shape of x."]
    scale_backprop: Annotated[TensorT_co, "U, shape [C]."]
    offset_backprop: Annotated[TensorT_co, "U, shape [C]."]
    reserve_space_4: Annotated[TensorT_co, "U, shape [0]: a placeholder."]
    reserve_space_5: Annotated[TensorT_co, "U, shape [0]: a placeholder."]


FUSED_BATCH_NORM_V3 = Op(
    name="FusedBatchNormV3",
    request=fused_batch_norm_messages_pb2.FusedBatchNormRequest,
    summary="Normalises a batch of images or volumes over all axes but the channels.",
    text="""
    In the following, C is the number of channels, M the number of elements in a channel, T the dtype of x, and U
    float32, or float64 if T is.
    """,
    arguments=(
        _X,
        _SCALE,
        Input("offset", _U, "U, shape [C]."),
        Input(
            "mean",
            _U,
            "U, shape [C]: the population mean, or in training the moving mean. Not read, and of any length (such as "
            "0), in training with an exponential_avg_factor of 1.",
        ),
        Input("variance", _U, "Like `mean`, for the variance."),
        _EPSILON,
        Attribute(
            "exponential_avg_factor",
            "float",
            "f: the weight of the moments of x in batch_mean and batch_variance, in training.",
            1,
        ),
        _DATA_FORMAT,
        _IS_TRAINING,
    ),
    outputs=FusedBatchNormV3Outputs,
)

FUSED_BATCH_NORM_V2 = FUSED_BATCH_NORM_V3.older(
    "FusedBatchNormV2",
    "Normalises a batch of images: FusedBatchNormV3 for the data formats NHWC and NCHW.",
    changed={"x": _IMAGES, "data_format": _FORMAT_OF_IMAGES},
    outputs=FusedBatchNormOutputs,
)

FUSED_BATCH_NORM = FUSED_BATCH_NORM_V2.older(
    "FusedBatchNorm",
    "Normalises a batch of images: FusedBatchNormV3 for float32 and the data formats NHWC and NCHW.",
    changed={"x": _FLOAT_IMAGES},
)

FUSED_BATCH_NORM_GRAD_V3 = Op(
    name="FusedBatchNormGradV3",
    request=fused_batch_norm_messages_pb2.FusedBatchNormGradRequest,
    summary="Computes the gradients of FusedBatchNormV3 with respect to x, scale and offset.",
    text="C, T and U are as in `FusedBatchNormV3`.",
    arguments=(
        Input("y_backprop", _T, "T, the shape of x: the gradient with respect to y."),
        _X,
        _SCALE,
        Input(
            "reserve_space_1",
            _U,
            "U, shape [C]: in training the forward call's reserve_space_1, else its input `mean`.",
        ),
        Input(
            "reserve_space_2",
            _U,
            "U, shape [C]: in training the forward call's reserve_space_2, else its input `variance`.",
        ),
        Input("reserve_space_3", _U, "The forward call's reserve_space_3; not read.", is_optional=True),
        replace(_EPSILON, doc=_AS_IN_FORWARD),
        replace(_DATA_FORMAT, doc=_AS_IN_FORWARD),
        replace(_IS_TRAINING, doc=_AS_IN_FORWARD),
    ),
    outputs=FusedBatchNormGradV3Outputs,
)

FUSED_BATCH_NORM_GRAD_V2 = FUSED_BATCH_NORM_GRAD_V3.older(
    "FusedBatchNormGradV2",
    "Computes the gradients of FusedBatchNormV2: FusedBatchNormGradV3 for the data formats NHWC and NCHW.",
    without=("reserve_space_3",),
    changed={"x": _IMAGES, "data_format": replace(_FORMAT_OF_IMAGES, doc=_AS_IN_FORWARD)},
    outputs=FusedBatchNormGradOutputs,
)

FUSED_BATCH_NORM_GRAD = FUSED_BATCH_NORM_GRAD_V2.older(
    "FusedBatchNormGrad",
    "Computes the gradients of FusedBatchNorm: FusedBatchNormGradV3 for float32 and the data formats NHWC and NCHW.",
    changed={"x": _FLOAT_IMAGES},
)
