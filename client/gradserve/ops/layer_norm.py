"""LayerNorm and its gradient, which are PyTorch's, because TensorFlow has no such ops."""

from dataclasses import replace
from typing import Annotated, Generic, NamedTuple

from gradserve.abbreviation import abbreviated
from gradserve.ops.declaration import FLOAT32, Attribute, Input, Op, SameAs, StatisticsOf
from gradserve.results import TensorT_co
from gradserve.v1 import layer_norm_messages_pb2 as messages_pb2

_T, _U = SameAs("x"), StatisticsOf("x")
_X = Input("x", FLOAT32, "T, any shape that ends with S; the shape S itself makes one group.")
_SCALE = Input("scale", _U, "U, shape S.")


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
    request=messages_pb2.LayerNormRequest,
    summary="Normalizes each group of elements of x, as PyTorch's native_layer_norm does.",
    text="""
    In the following, T is the dtype of x: float16, bfloat16, float32 or float64. U is float32, or float64 if T
    is. S is the shape of scale, with at least one dimension. A group is all elements of x with the same indices
    in the dimensions before S.
    """,
    arguments=(
        _X,
        _SCALE,
        Input("offset", _U, "U, shape S."),
        Attribute("epsilon", "float", "Added to the variance.", 0.00001),
    ),
    outputs=LayerNormOutputs,
)

LAYER_NORM_GRAD = Op(
    name="LayerNormGrad",
    request=messages_pb2.LayerNormGradRequest,
    summary="Computes the gradients of LayerNorm with respect to x, scale and offset.",
    text="T, U and S are as in `LayerNorm`.",
    arguments=(
        Input("y_backprop", _T, "T, the shape of x: the gradient with respect to y."),
        replace(_X, doc="T, as in the forward call."),
        replace(_SCALE, doc="U, shape S, as in the forward call."),
        Input("mean", _U, "U: the forward call's mean."),
        Input("rstd", _U, "U: the forward call's rstd."),
    ),
    outputs=LayerNormGradOutputs,
)
