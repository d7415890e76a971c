"""The calls of `Client.raw_ops`: accumulator ops are written here, gradient ops are declared in `gradserve.ops`."""

from gradserve.calls.raw_ops import docstrings
from gradserve.calls.raw_ops.accumulators import AccumulatorOps
from gradserve.calls.raw_ops.methods import method_of
from gradserve.calls.raw_ops.sparse_accumulators import SparseAccumulatorOps
from gradserve.ops.table import OPS


class RawOpsCalls(AccumulatorOps, SparseAccumulatorOps):
    """Calls of `RawOps`. The gradient ops are added as methods below."""


for _op in OPS:
    setattr(RawOpsCalls, _op.name, method_of(_op))

docstrings.complete(
    RawOpsCalls,
    {
        "ResourceConditionalAccumulator": "ConditionalAccumulator",
        "SparseConditionalAccumulator": "ConditionalAccumulator",
        "ResourceAccumulatorApplyGradient": "AccumulatorApplyGradient",
        "ResourceAccumulatorTakeGradient": "AccumulatorTakeGradient",
        "SparseAccumulatorTakeGradient": "AccumulatorTakeGradient",
        "ResourceAccumulatorNumAccumulated": "AccumulatorNumAccumulated",
        "ResourceAccumulatorSetGlobalStep": "AccumulatorSetGlobalStep",
    },
)
