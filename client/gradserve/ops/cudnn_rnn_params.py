"""The ops on the parameters of CudnnRNN, in TensorFlow's two versions."""

from typing import Annotated, Any, Generic, NamedTuple

from gradserve.abbreviation import abbreviated
from gradserve.conversion.argument import Argument, described
from gradserve.conversion.arrays import as_array
from gradserve.conversion.dtypes import as_dtype
from gradserve.conversion.plain import INT32, as_integer
from gradserve.errors import InvalidArgumentError
from gradserve.ops.cudnn_rnn import NETWORK, NUM_PROJ
from gradserve.ops.declaration import FLOAT32, Attribute, Input, Op, SingleOutput
from gradserve.results import TensorT_co
from gradserve.v1 import cudnn_rnn_messages_pb2 as messages_pb2

_UNUSED = "parameters do not depend on the dropout"


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
    if size.dtype.kind not in "iu" or int(size) not in INT32:
        raise InvalidArgumentError(f"{argument.name} must be an int32, got {described(value)}", field=argument.name)
    return int(size)


def _count(value: Any, argument: Argument) -> int:
    return as_integer(value, argument, INT32)


def _dtype_name(value: Any, argument: Argument) -> str:
    return as_dtype(value, argument).name


_SIZES = (
    Attribute("num_layers", "ArrayLike", "L, a scalar.", convert=_size),
    Attribute("num_units", "ArrayLike", "H, a scalar.", convert=_size),
    Attribute("input_size", "ArrayLike", "I, a scalar.", convert=_size),
)
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
