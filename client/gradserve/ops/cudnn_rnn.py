"""CudnnRNN and its gradient, in TensorFlow's three versions: the older two are views of the newest."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Generic, NamedTuple

from gradserve.abbreviation import abbreviated
from gradserve.batch_norm_results import IgnoredArgument
from gradserve.ops.declaration import FLOAT32, INT8, INT32, Attribute, Input, Op, SameAs
from gradserve.results import TensorT_co
from gradserve.v1 import cudnn_rnn_messages_pb2 as messages_pb2

_T = SameAs("input")
NETWORK = (
    Attribute("rnn_mode", "str", '"rnn_relu", "rnn_tanh", "lstm" or "gru".', "lstm"),
    Attribute("input_mode", "str", '"linear_input", "skip_input" or "auto_select".', "linear_input"),
    Attribute("direction", "str", '"unidirectional" or "bidirectional".', "unidirectional"),
)
NUM_PROJ = Attribute("num_proj", "int", "The size of the projection of the hidden state, for lstm; 0 for none.", 0)

_OUTPUT_BACKPROP = Input("output_backprop", _T, "The shape of output: the gradient with respect to it.")
_OF_V3 = ("sequence_lengths", "num_proj", "time_major")
_TIME_FIRST = """
T is the number of steps, B of sequences, L of layers, D of directions and H of units; I is the size of the
input. All floats have the dtype of `input`: float16, bfloat16, float32 or float64.
"""


@abbreviated
class CudnnRNNOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNN; see `RawOps.CudnnRNNV3`."""

    output: TensorT_co
    output_h: TensorT_co
    output_c: TensorT_co
    reserve_space: TensorT_co


@abbreviated
class CudnnRNNV3Outputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNV2 and CudnnRNNV3; see `RawOps.CudnnRNNV3`."""

    output: Annotated[TensorT_co, "[T, B, D * H'], or [B, T, D * H']; 0 beyond the end of a sequence."]
    output_h: Annotated[TensorT_co, "The shape of input_h: the state after the last step of each sequence."]
    output_c: Annotated[TensorT_co, "The shape of input_c for lstm, else a scalar."]
    reserve_space: Annotated[TensorT_co, "Opaque, for the gradient; a scalar when not training."]
    host_reserved: Annotated[TensorT_co, "Opaque, for the gradient; a scalar when not training."]


@abbreviated
class CudnnRNNBackpropOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNBackprop in all versions; see `RawOps.CudnnRNNBackpropV3`."""

    input_backprop: Annotated[TensorT_co, "The shape of input; 0 beyond the end of a sequence."]
    input_h_backprop: Annotated[TensorT_co, "The shape of input_h."]
    input_c_backprop: Annotated[TensorT_co, "The shape of input_c for lstm, else a scalar."]
    params_backprop: Annotated[TensorT_co, "The shape of params."]


def _ignored(inputs: Mapping[str, Any], fields: Mapping[str, object]) -> Iterable[IgnoredArgument]:
    """Yields the dropout of a network with one layer, as there is none after the last."""
    shape = inputs["input_h"].shape
    rows = shape[0 if fields.get("time_major", True) else 1] if len(shape) == 3 else 0
    if fields["dropout"] and fields["is_training"] and rows == (2 if fields["direction"] == "bidirectional" else 1):
        yield IgnoredArgument("dropout", "it drops elements between layers, and the network has one layer")


CUDNN_RNN_V3 = Op(
    name="CudnnRNNV3",
    request=messages_pb2.CudnnRNNRequest,
    summary="Applies a recurrent network of L layers and D directions to B sequences of up to T steps.",
    text="""
    H is the number of units, H' the size of the hidden state: num_proj with a projection, else H. All
    floats have the dtype of `input`: float16, bfloat16, float32 or float64.
    """,
    arguments=(
        Input("input", FLOAT32, "[T, B, I], or [B, T, I] if not `time_major`."),
        Input("input_h", _T, "[L * D, B, H'], or [B, L * D, H'] if not `time_major`; layer * D + direction."),
        Input(
            "input_c",
            _T,
            "[L * D, B, H], or [B, L * D, H] if not `time_major`. For lstm; else not read.",
            is_optional=True,
        ),
        Input("params", _T, "The parameter vector; see `CudnnRNNCanonicalToParamsV2`."),
        Input("sequence_lengths", INT32, "Integers, [B], each from 1 to T; None: all are T.", is_optional=True),
        *NETWORK,
        Attribute(
            "dropout",
            "float",
            "The probability of dropping an element of a layer's input in training; the first layer drops none, so "
            "that an IgnoredArgumentWarning says so if there is no other.",
            0,
        ),
        Attribute("seed", "int", "The seed of the dropout, together with `seed2`.", 0),
        Attribute("seed2", "int", "See `seed`.", 0),
        NUM_PROJ,
        Attribute("is_training", "bool", "Whether to keep what the gradient needs, and to drop elements.", True),
        Attribute("time_major", "bool", "Whether time is the first dimension; otherwise the batch is.", True),
    ),
    outputs=CudnnRNNV3Outputs,
    ignored=_ignored,
)

CUDNN_RNN_V2 = CUDNN_RNN_V3.older(
    "CudnnRNNV2",
    "Applies a recurrent network: CudnnRNNV3 with time first, whole sequences and without a projection.",
    text=_TIME_FIRST,
    without=_OF_V3,
    changed={
        "input": Input("input", FLOAT32, "[T, B, I]."),
        "input_h": Input("input_h", _T, "[L * D, B, H]; layer * D + direction."),
        "input_c": Input("input_c", _T, "[L * D, B, H]. For lstm; else not read.", is_optional=True),
    },
)

CUDNN_RNN = CUDNN_RNN_V2.older("CudnnRNN", CUDNN_RNN_V2.summary, outputs=CudnnRNNOutputs)


def _of_forward(argument: Input | Attribute) -> Input | Attribute:
    """Returns an argument of the forward call as the gradient has it."""
    for_lstm = " For lstm; else not read." if argument.name == "input_c" else ""
    return replace(argument, doc=f"As in the forward call.{for_lstm}")


CUDNN_RNN_BACKPROP_V3 = Op(
    name="CudnnRNNBackpropV3",
    request=messages_pb2.CudnnRNNBackpropRequest,
    summary="Computes the gradients of CudnnRNNV3 in training for the input, the states and the parameters.",
    text="",
    arguments=(
        *map(_of_forward, CUDNN_RNN_V3.inputs),
        Input("output", _T, "The forward call's output."),
        Input("output_h", _T, "The forward call's output_h."),
        Input("output_c", _T, "The forward call's output_c. For lstm; else not read.", is_optional=True),
        replace(_OUTPUT_BACKPROP, doc=f"{_OUTPUT_BACKPROP.doc} Not read beyond the end of a sequence."),
        Input("output_h_backprop", _T, "The shape of output_h: the gradient with respect to it."),
        Input(
            "output_c_backprop",
            _T,
            "The shape of output_c: the gradient with respect to it. For lstm; else not read.",
            is_optional=True,
        ),
        Input("reserve_space", _T, "The forward call's reserve_space; any other is refused."),
        Input("host_reserved", INT8, "The forward call's host_reserved; any other is refused."),
        *(_of_forward(each) for each in CUDNN_RNN_V3.attributes if each.name != "is_training"),
    ),
    outputs=CudnnRNNBackpropOutputs,
)

CUDNN_RNN_BACKPROP_V2 = CUDNN_RNN_BACKPROP_V3.older(
    "CudnnRNNBackpropV2",
    "Computes the gradients of CudnnRNNV2 in training for the input, the states and the parameters.",
    without=_OF_V3,
    changed={"output_backprop": _OUTPUT_BACKPROP},
)

CUDNN_RNN_BACKPROP = CUDNN_RNN_BACKPROP_V2.older(
    "CudnnRNNBackprop",
    "Computes the gradients of CudnnRNN in training for the input, the states and the parameters.",
    without=("host_reserved",),
)
