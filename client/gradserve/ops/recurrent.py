"""The ops of recurrent networks: cuDNN's, their parameters, and the GRU cell."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Generic, NamedTuple

from gradserve.batch_norm import IgnoredArgument
from gradserve.conversion.arrays import as_array, as_dtype
from gradserve.conversion.plain import as_integer
from gradserve.errors import InvalidArgumentError
from gradserve.ops.declaration import FLOAT32, INT8, INT32, Attribute, Input, Op, SameAs, SingleOutput
from gradserve.results import TensorT_co
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.printing import abbreviated
from gradserve_protocol.v1 import cudnn_rnn_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import gru_block_cell_messages_pb2 as gru_messages_pb2

_LIKE_X = SameAs("x")
_BIASES = ("b_ru", "b_c")
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
_INT32_RANGE = range(-(1 << 31), 1 << 31)
_UNUSED = "parameters do not depend on the dropout"
_ATTRIBUTES = (
    *NETWORK,
    Attribute(
        "dropout",
        "float",
        "Has no effect; an IgnoredArgumentWarning says so if it is not 0.",
        0.0,
        no_effect=_UNUSED,
    ),
    Attribute("seed", "int", "As `dropout`.", 0, no_effect=_UNUSED),
    Attribute("seed2", "int", "As `dropout`.", 0, no_effect=_UNUSED),
    NUM_PROJ,
)


@abbreviated
class GRUBlockCellOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCell; see `RawOps.GRUBlockCell`."""

    r: Annotated[TensorT_co, "T, shape [B, H]: the reset gate."]
    u: Annotated[TensorT_co, "T, shape [B, H]: the update gate."]
    c: Annotated[TensorT_co, "T, shape [B, H]: the candidate state."]
    h: Annotated[TensorT_co, "T, shape [B, H]: the new state."]


@abbreviated
class GRUBlockCellGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad, as TensorFlow has them; see `RawOps.GRUBlockCellGrad`."""

    d_x: TensorT_co
    d_h_prev: TensorT_co
    d_c_bar: TensorT_co
    d_r_bar_u_bar: TensorT_co


@abbreviated
class GRUBlockCellAllGradOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of GRUBlockCellGrad with `weight_gradients`; see `RawOps.GRUBlockCellGrad`."""

    d_x: Annotated[TensorT_co, "T, shape [B, I]."]
    d_h_prev: Annotated[TensorT_co, "T, shape [B, H]."]
    d_c_bar: Annotated[TensorT_co, "T, shape [B, H]: with respect to the argument of tanh."]
    d_r_bar_u_bar: Annotated[TensorT_co, "T, shape [B, 2H]: with respect to the argument of the sigmoid."]
    d_w_ru: Annotated[TensorT_co, "T, shape [I + H, 2H]."]
    d_w_c: Annotated[TensorT_co, "T, shape [I + H, H]."]
    d_b_ru: Annotated[TensorT_co, "T, shape [2H]."]
    d_b_c: Annotated[TensorT_co, "T, shape [H]."]


GRU_BLOCK_CELL = Op(
    name="GRUBlockCell",
    request=gru_messages_pb2.GRUBlockCellRequest,
    summary="Computes one step of a GRU for a batch.",
    text="""
        [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
        c      = tanh([x, h_prev r] . w_c + b_c)
        h      = u h_prev + (1 - u) c

    In the following, B is the batch, I the size of the input, H the size of the cell, and T the dtype of x and of
    all other tensors: float16, bfloat16, float32 or float64.
    """,
    arguments=(
        Input("x", FLOAT32, "T, shape [B, I]."),
        Input("h_prev", _LIKE_X, "T, shape [B, H]: the previous state."),
        Input("w_ru", _LIKE_X, "T, shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u."),
        Input("w_c", _LIKE_X, "T, shape [I + H, H]: rows as in w_ru."),
        Input("b_ru", _LIKE_X, "T, shape [2H]: for r, then for u."),
        Input("b_c", _LIKE_X, "T, shape [H]."),
    ),
    outputs=GRUBlockCellOutputs,
)

GRU_BLOCK_CELL_GRAD = Op(
    name="GRUBlockCellGrad",
    request=gru_messages_pb2.GRUBlockCellGradRequest,
    summary="Computes the gradients of GRUBlockCell.",
    text="B, I, H and T are as in `GRUBlockCell`.",
    arguments=(
        *(
            replace(each, doc=f"As in the forward call{'; only its shape counts' * (each.name in _BIASES)}.")
            for each in GRU_BLOCK_CELL.inputs
        ),
        Input("r", _LIKE_X, "T, shape [B, H]: the forward call's r."),
        Input("u", _LIKE_X, "T, shape [B, H]: the forward call's u."),
        Input("c", _LIKE_X, "T, shape [B, H]: the forward call's c."),
        Input("d_h", _LIKE_X, "T, shape [B, H]: the gradient with respect to h."),
        Attribute(
            "weight_gradients",
            "bool",
            "Whether to compute the last four outputs, which TensorFlow's op does not have.",
            False,
        ),
    ),
    outputs=GRUBlockCellGradOutputs,
    more_outputs=("weight_gradients", GRUBlockCellAllGradOutputs),
)


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


@abbreviated
class CudnnRNNParamsToCanonicalOutputs(NamedTuple, Generic[TensorT_co]):
    """Outputs of CudnnRNNParamsToCanonical and its V2; see `RawOps.CudnnRNNParamsToCanonicalV2`."""

    weights: Annotated[list[TensorT_co], "The list of matrices."]
    biases: Annotated[list[TensorT_co], "The list of biases."]


def _size(value: Any, argument: Argument) -> int:
    """Returns a size, which TensorFlow passes as a scalar tensor."""
    size = as_array(value, argument)
    if size.ndim:
        raise InvalidArgumentError(f"{argument.name} is not a scalar", field=argument.name)
    if size.dtype.kind not in "iu" or int(size) not in _INT32_RANGE:
        raise InvalidArgumentError(f"{argument.name} must be an int32, got {described(value)}", field=argument.name)
    return int(size)


def _count(value: Any, argument: Argument) -> int:
    return as_integer(value, argument, _INT32_RANGE)


def _dtype_name(value: Any, argument: Argument) -> str:
    return as_dtype(value, argument).name


_SIZES = (
    Attribute("num_layers", "ArrayLike", "L, a scalar.", convert=_size),
    Attribute("num_units", "ArrayLike", "H, a scalar.", convert=_size),
    Attribute("input_size", "ArrayLike", "I, a scalar.", convert=_size),
)

CUDNN_RNN_PARAMS_SIZE = Op(
    name="CudnnRNNParamsSize",
    request=messages_pb2.CudnnRNNParamsSizeRequest,
    summary="Returns the length of the parameter vector of a network.",
    text="",
    arguments=(
        *_SIZES,
        Attribute(
            "T",
            "DTypeLike",
            "The dtype of the parameters: float16, bfloat16, float32 or float64. The size does not depend on it.",
            "float32",
            allowed=("float16", "bfloat16", "float32", "float64"),
            fields=(),
            convert=_dtype_name,
        ),
        Attribute(
            "S", "DTypeLike", "The dtype of the size: int32 or int64.", "int32", fields=("s",), convert=_dtype_name
        ),
        *_ATTRIBUTES,
    ),
    outputs=SingleOutput("params_size", "S, shape [1]."),
)

CUDNN_RNN_CANONICAL_TO_PARAMS_V2 = Op(
    name="CudnnRNNCanonicalToParamsV2",
    request=messages_pb2.CudnnRNNCanonicalToParamsRequest,
    summary="Makes the parameter vector of a network from its matrices and biases.",
    text="""
    G is the number of gates, D of directions and H of units; H' is the size of the hidden state. For each layer and
    direction there are the matrices W of all gates, each [H, size of the layer's input], R of all gates, each [H,
    H'], and with a projection its matrix, [num_proj, H]; and the biases bW of all gates and bR of all gates, each
    [H]. Gates are in the order input, forget, new memory, output (lstm); reset, update, new memory (gru). With
    skip_input the matrices W of the first layer have no columns: [H, 0]. Each may have any other shape with as many
    elements, such as flat: the elements are read row by row.
    """,
    arguments=(
        *_SIZES,
        Input("weights", FLOAT32, "The matrices.", is_list=True),
        Input("biases", FLOAT32, "The biases.", is_list=True),
        *_ATTRIBUTES,
    ),
    outputs=SingleOutput("params", "The parameter vector."),
)

CUDNN_RNN_CANONICAL_TO_PARAMS = CUDNN_RNN_CANONICAL_TO_PARAMS_V2.older(
    "CudnnRNNCanonicalToParams",
    "Makes the parameter vector of a network: CudnnRNNCanonicalToParamsV2 without a projection.",
    without=("num_proj",),
)

_NUM_WEIGHTS = Attribute("num_params_weights", "int", "The number of matrices.", convert=_count)
_NUM_BIASES = Attribute("num_params_biases", "int", "The number of biases.", convert=_count)

CUDNN_RNN_PARAMS_TO_CANONICAL_V2 = Op(
    name="CudnnRNNParamsToCanonicalV2",
    request=messages_pb2.CudnnRNNParamsToCanonicalRequest,
    summary="Splits the parameter vector of a network; the reverse of `CudnnRNNCanonicalToParamsV2`.",
    text="",
    arguments=(*_SIZES, Input("params", FLOAT32, "The parameter vector."), _NUM_WEIGHTS, _NUM_BIASES, *_ATTRIBUTES),
    outputs=CudnnRNNParamsToCanonicalOutputs,
)

CUDNN_RNN_PARAMS_TO_CANONICAL = CUDNN_RNN_PARAMS_TO_CANONICAL_V2.older(
    "CudnnRNNParamsToCanonical",
    "Splits the parameter vector of a network: CudnnRNNParamsToCanonicalV2 without a projection.",
    without=("num_params_biases", "num_proj"),
    changed={
        "num_params_weights": Attribute(
            "num_params",
            "int",
            "The number of matrices, and of biases.",
            fields=("num_params_weights", "num_params_biases"),
            convert=_count,
        )
    },
)
