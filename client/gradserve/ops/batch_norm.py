"""FusedBatchNorm and its gradient, in TensorFlow's three versions: the older two are views of the newest."""

from dataclasses import replace
from typing import Annotated, Generic, NamedTuple

from gradserve.abbreviation import abbreviated
from gradserve.ops.declaration import FLOAT32, Attribute, Field, Input, Op, SameAs, StatisticsOf
from gradserve.results import TensorT_co
from gradserve.v1 import fused_batch_norm_messages_pb2 as messages_pb2

_T, _U = SameAs("x"), StatisticsOf("x")

_X = Input("x", FLOAT32, "float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.")
_IMAGES = replace(_X, doc="float16, bfloat16, float32 or float64, of rank 4.")
_FLOAT_IMAGES = replace(_X, doc="float32, of rank 4.", allowed_dtypes=("float",))
_SCALE = Input("scale", _U, "U, shape [C].")
_EPSILON = Attribute("epsilon", "float", "Added to the variance.", 0.0001)
_DATA_FORMAT = Attribute("data_format", "str", '"NHWC", "NCHW", "NDHWC" or "NCDHW".', "NHWC")
_FORMAT_OF_IMAGES = replace(_DATA_FORMAT, doc='"NHWC" or "NCHW".', allowed=("NHWC", "NCHW"))
_IS_TRAINING = Attribute(
    "is_training", "bool", "Whether to normalise by the moments of x, or by `mean` and `variance`.", True
)
_AS_IN_FORWARD = "As in the forward call."


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
    request=messages_pb2.FusedBatchNormRequest,
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
    request=messages_pb2.FusedBatchNormGradRequest,
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
