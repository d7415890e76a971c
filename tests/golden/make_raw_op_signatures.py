"""Records the signatures of TensorFlow's raw ops that gradserve has: writes raw_op_signatures.json beside this file.

For the environment that this runs in see make_fused_batch_norm.py.
"""

import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2"}

import inspect
import json
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.python.framework import op_def_registry

ACCUMULATOR_OPS = (
    "ConditionalAccumulator",
    "ResourceConditionalAccumulator",
    "SparseConditionalAccumulator",
    "AccumulatorApplyGradient",
    "ResourceAccumulatorApplyGradient",
    "SparseAccumulatorApplyGradient",
    "AccumulatorTakeGradient",
    "ResourceAccumulatorTakeGradient",
    "SparseAccumulatorTakeGradient",
    "AccumulatorNumAccumulated",
    "ResourceAccumulatorNumAccumulated",
    "AccumulatorSetGlobalStep",
    "ResourceAccumulatorSetGlobalStep",
    "DestroyResourceOp",
)
GRADIENT_OPS = (
    *(f"FusedBatchNorm{kind}{version}" for kind in ("", "Grad") for version in ("", "V2", "V3")),
    "GRUBlockCell",
    "GRUBlockCellGrad",
    *(f"CudnnRNN{kind}{version}" for kind in ("", "Backprop") for version in ("", "V2", "V3")),
    "CudnnRNNParamsSize",
    *(f"CudnnRNN{kind}{version}" for kind in ("CanonicalToParams", "ParamsToCanonical") for version in ("", "V2")),
)


def main() -> None:
    """Writes down every op."""
    ops = {op: signature(op) for op in (*ACCUMULATOR_OPS, *GRADIENT_OPS)}
    lines = ",\n".join(f"{json.dumps(op)}: {json.dumps(recorded)}" for op, recorded in ops.items())
    path = Path(__file__).with_name("raw_op_signatures.json")
    path.write_text(f'{{"tensorflow": "{tf.__version__}", "ops": {{\n{lines}\n}}}}\n')


def signature(op: str) -> dict[str, Any]:
    """Returns the arguments in their order, defaults by name, and of attributes that have them the allowed values."""
    parameters = inspect.signature(getattr(tf.raw_ops, op)).parameters.values()
    definition = op_def_registry.get(op)
    return {
        "arguments": [each.name for each in parameters],
        "defaults": {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty},
        "outputs": [output.name for output in definition.output_arg],
        "allowed": {attr.name: allowed(attr) for attr in definition.attr if attr.HasField("allowed_values")},
    }


def allowed(attr: OpDef.AttrDef) -> list[str]:
    """Returns the values that an attribute may have; of types, their names."""
    values = attr.allowed_values.list
    return [value.decode() for value in values.s] or [tf.as_dtype(value).name for value in values.type]


if __name__ == "__main__":
    main()
