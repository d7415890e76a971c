"""Bad calls of the CudnnRNN ops."""

from typing import Any

import grpc
import numpy as np

from gradserve_protocol.v1 import cudnn_rnn_messages_pb2 as rnn_pb2
from gradserve_protocol.v1 import tensor_pb2
from tests.bad_input.requests import INT64_MAX, INT64_MIN, INVALID, NOT_FOUND, Bad, tensor, zeros

# An lstm: T = 5, B = 3, I = 4, H = 6.
STATE = zeros(1, 3, 6)
FORWARD: dict[str, Any] = {
    "input": zeros(5, 3, 4),
    "input_h": STATE,
    "input_c": STATE,
    "params": zeros(4 * 6 * (4 + 6) + 8 * 6),
}
BACKPROP: dict[str, Any] = {
    **FORWARD,
    **dict.fromkeys(("output", "output_backprop"), zeros(5, 3, 6)),
    **dict.fromkeys(("output_h", "output_c", "output_h_backprop", "output_c_backprop"), STATE),
    "reserve_space": zeros(1000),
}
NETWORK: dict[str, Any] = {"num_layers": 1, "num_units": 2, "input_size": 3}
NOBODY = tensor_pb2.Tensor(handle="nobody")


def forward(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("CudnnRNN", rnn_pb2.CudnnRNNRequest(**{**FORWARD, **fields}), message, field, code)


def backprop(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    return Bad("CudnnRNNBackprop", rnn_pb2.CudnnRNNBackpropRequest(**{**BACKPROP, **fields}), message, field, code)


def size(message: str, field: str, **fields: Any) -> Bad:
    return Bad("CudnnRNNParamsSize", rnn_pb2.CudnnRNNParamsSizeRequest(**{**NETWORK, **fields}), message, field)


def to_params(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    shapes = [(2, 3)] * 4 + [(2, 2)] * 4
    lists = {"weights": [zeros(*shape) for shape in shapes], "biases": [zeros(2)] * 8}
    request = rnn_pb2.CudnnRNNCanonicalToParamsRequest(**{**NETWORK, **lists, **fields})
    return Bad("CudnnRNNCanonicalToParams", request, message, field, code)


def to_canonical(message: str, field: str, code: grpc.StatusCode = INVALID, /, **fields: Any) -> Bad:
    counts = {"num_params_weights": 8, "num_params_biases": 8}
    request = rnn_pb2.CudnnRNNParamsToCanonicalRequest(**{**NETWORK, **counts, "params": zeros(56), **fields})
    return Bad("CudnnRNNParamsToCanonical", request, message, field, code)


BAD_RNNS = [
    *[
        call(f"Value for attr '{name}' of \"x\" is not in the list of allowed values", name, **{name: "x"})
        for call in (forward, backprop, size, to_params, to_canonical)
        for name in ("rnn_mode", "input_mode", "direction")
    ],
    *[forward("expected content or a handle, got neither", name, **{name: tensor_pb2.Tensor()}) for name in FORWARD],
    *[backprop("expected content or a handle", name, **{name: tensor_pb2.Tensor()}) for name in BACKPROP],
    *[forward("no tensor with the handle", f"{name}.handle", NOT_FOUND, **{name: NOBODY}) for name in FORWARD],
    *[backprop("no tensor with the handle", f"{name}.handle", NOT_FOUND, **{name: NOBODY}) for name in BACKPROP],
    forward("RNN input must be a 3-D vector.", "input", input=zeros(5, 3)),
    forward("RNN input_h must be a 3-D vector.", "input_h", input_h=zeros(3, 6)),
    forward("Invalid input_h shape", "input_h", input_h=zeros(1, 2, 6)),
    forward("params", "params", params=zeros(287)),
    forward("params", "params", params=zeros(2, 144)),
    forward("sequence_lengths", "sequence_lengths", sequence_lengths=tensor([5, 5], np.int32)),
    forward("sequence_lengths", "sequence_lengths", sequence_lengths=tensor([5, 5, 5], np.int64)),
    forward("sequence_lengths must be from 1", "sequence_lengths", sequence_lengths=tensor([5, 0, 5], np.int32)),
    forward("sequence_lengths must be from 1", "sequence_lengths", sequence_lengths=tensor([5, 6, 5], np.int32)),
    forward("sequence_lengths", "sequence_lengths", sequence_lengths=tensor([-(1 << 31), 1, 5], np.int32)),
    *[forward("dropout", "dropout", dropout=value) for value in (1.0, -0.1, 2.0, float("nan"), float("inf"))],
    forward("seed", "seed", seed=INT64_MAX),
    forward("seed2", "seed2", seed2=INT64_MIN),
    forward("num_proj", "num_proj", num_proj=INT64_MAX),
    forward("skip_input", "input_mode", input_mode="skip_input"),
    backprop("Invalid output shape", "output", output=zeros(5, 3, 7)),
    backprop("Invalid output_h shape", "output_h", output_h=zeros(2, 3, 6)),
    backprop("Invalid output_backprop shape", "output_backprop", output_backprop=zeros(4, 3, 6)),
    backprop("Invalid output_h_backprop shape", "output_h_backprop", output_h_backprop=zeros(1, 3, 5)),
    backprop("reserve_space", "reserve_space"),
    backprop("reserve_space", "reserve_space", reserve_space=zeros(0)),
    backprop("host_reserved", "host_reserved", host_reserved=tensor(np.zeros(64), np.float32)),
    size("num_layers must be at least 1, got 0", "num_layers", num_layers=0),
    size("num_layers", "num_layers", num_layers=INT64_MAX),
    size("num_units", "num_units", num_units=INT64_MIN),
    size("int32 cannot hold the params size", "s", num_layers=(1 << 31) - 1),
    size("'S' of float32", "s", s="float32"),
    size("num_proj must be from 0", "num_proj", num_proj=3),
    to_params("weights must be a list of 8", "weights", weights=[zeros(2, 3)] * 7),
    to_params("biases must be a list of 8", "biases", biases=[]),
    to_params("weights[0] must have 6 elements", "weights[0]", weights=[zeros(2, 2)] * 8),
    to_params("biases[0] must have 2 elements", "biases[0]", biases=[zeros(3)] * 8),
    to_params("no tensor with the handle", "biases[7].handle", NOT_FOUND, biases=[zeros(2)] * 7 + [NOBODY]),
    to_params("expected content or a handle", "biases[7]", biases=[zeros(2)] * 7 + [tensor_pb2.Tensor()]),
    to_params("weights must be a list of", "weights", num_layers=(1 << 31) - 1),
    to_canonical("Params size mismatch. Expected", "params", params=zeros(55)),
    to_canonical("Number of params mismatch", "num_params_weights", num_params_weights=10),
    to_canonical("Number of params mismatch", "num_params_biases", num_params_biases=7),
    to_canonical("num_params_weights", "num_params_weights", num_params_weights=0),
    to_canonical("expected at most 4096 tensors, got 4097", "num_params_biases", num_params_biases=4097),
    to_canonical("expected content or a handle", "params", params=tensor_pb2.Tensor()),
]
"""Of each op, what is wrong with a call."""
