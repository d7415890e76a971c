"""Every raw op has TensorFlow's arguments and defaults."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

import gradserve
import gradserve.aio
from tests.golden.raw_op_signatures import load_signatures

SIGNATURES = load_signatures()

NEED_NOT_BE_GIVEN: dict[str, set[str]] = {
    "CudnnRNN": {"input_c"},
    "CudnnRNNV2": {"input_c"},
    "CudnnRNNV3": {"input_c", "sequence_lengths"},
    "CudnnRNNBackprop": {"input_c", "output_c", "output_c_backprop"},
    "CudnnRNNBackpropV2": {"input_c", "output_c", "output_c_backprop"},
    "CudnnRNNBackpropV3": {"input_c", "output_c", "output_c_backprop", "sequence_lengths"},
    "CudnnRNNParamsSize": {"T", "S"},
    "FusedBatchNormGradV3": {"reserve_space_3"},
}
"""What TensorFlow has no default for."""


def tensorflows(op: str) -> set[str]:
    """Returns TensorFlow's arguments."""
    return set(SIGNATURES[op].arguments)


def more(op: str) -> set[str]:
    """Returns the arguments that TensorFlow does not have."""
    if op.endswith("ApplyGradient"):
        return {"request_id", "worker_id"}
    if op.endswith("TakeGradient"):
        return {"request_id", "timeout"}
    if op.startswith(("FusedBatchNorm", "GRUBlockCell", "CudnnRNN")):
        return {"keep", "lease"} | ({"weight_gradients"} if op == "GRUBlockCellGrad" else set())
    return set()


def parameters(face: type, op: str) -> Mapping[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(face, op)).parameters)
    del found["self"]
    return found


@pytest.mark.parametrize("face", [gradserve.RawOps, gradserve.aio.RawOps], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("op", SIGNATURES)
class TestSignature:
    def test_arguments(self, face: type, op: str) -> None:
        assert set(parameters(face, op)) == tensorflows(op) | more(op)

    def test_defaults(self, face: type, op: str) -> None:
        theirs = {name: value for name, value in SIGNATURES[op].defaults.items() if name in tensorflows(op)}
        ours = {
            name: each.default
            for name, each in parameters(face, op).items()
            if name in tensorflows(op) and each.default is not inspect.Parameter.empty
        }
        assert {name: ours.get(name, inspect.Parameter.empty) for name in theirs} == theirs
        assert set(ours) - set(theirs) == NEED_NOT_BE_GIVEN.get(op, set())


NOT_OF_TENSORFLOW = {"LayerNorm", "LayerNormGrad"}
"""PyTorch has them."""


def test_every_op_is_recorded() -> None:
    assert {name for name in vars(gradserve.RawOps) if name[0].isupper()} == set(SIGNATURES) | NOT_OF_TENSORFLOW


@pytest.mark.parametrize("attribute", ["T", "S", "rnn_mode", "input_mode", "direction"])
def test_allowed_values(client: gradserve.Client, attribute: str) -> None:
    """Each of them, and no other."""
    allowed = SIGNATURES["CudnnRNNParamsSize"].allowed[attribute]
    sizes: dict[str, Any] = {"num_layers": 2, "num_units": 3, "input_size": 3}
    for value in allowed:
        client.raw_ops.CudnnRNNParamsSize(**{**sizes, attribute: value})
    for other in {"float32", "int32", "lstm", "skip_input", "bidirectional", "uint8"} - set(allowed):
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            client.raw_ops.CudnnRNNParamsSize(**{**sizes, attribute: other})
        assert raised.value.field in (attribute, attribute.lower())


OUTPUTS = {
    op: getattr(gradserve, f"{kind}Outputs")
    for op, kind in {
        "FusedBatchNorm": "FusedBatchNorm",
        "FusedBatchNormV2": "FusedBatchNorm",
        "FusedBatchNormV3": "FusedBatchNormV3",
        "FusedBatchNormGrad": "FusedBatchNormGrad",
        "FusedBatchNormGradV2": "FusedBatchNormGrad",
        "FusedBatchNormGradV3": "FusedBatchNormGradV3",
        "GRUBlockCell": "GRUBlockCell",
        "GRUBlockCellGrad": "GRUBlockCellGrad",
        "CudnnRNN": "CudnnRNN",
        "CudnnRNNV2": "CudnnRNNV3",
        "CudnnRNNV3": "CudnnRNNV3",
        "CudnnRNNBackprop": "CudnnRNNBackprop",
        "CudnnRNNBackpropV2": "CudnnRNNBackprop",
        "CudnnRNNBackpropV3": "CudnnRNNBackprop",
        "CudnnRNNParamsToCanonical": "CudnnRNNParamsToCanonical",
        "CudnnRNNParamsToCanonicalV2": "CudnnRNNParamsToCanonical",
    }.items()
}


@pytest.mark.parametrize("op", OUTPUTS)
def test_outputs(op: str) -> None:
    assert OUTPUTS[op]._fields == SIGNATURES[op].outputs
