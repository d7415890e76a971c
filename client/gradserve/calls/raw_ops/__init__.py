"""The calls of `Client.raw_ops`: accumulator ops are written here, gradient ops are declared in `gradserve.ops`."""

from difflib import get_close_matches

from gradserve.calls.raw_ops.accumulator_arguments import accept_names
from gradserve.calls.raw_ops.accumulators import AccumulatorOps, SparseAccumulatorOps
from gradserve.calls.raw_ops.gradient_ops import method_of
from gradserve.ops import OPS
from gradserve.public_names import complete_docstrings


class RawOpsCalls(AccumulatorOps, SparseAccumulatorOps):
    """Calls of `RawOps`. The gradient ops are added as methods below."""


for _op in OPS:
    setattr(RawOpsCalls, _op.name, method_of(_op))

complete_docstrings(
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
accept_names(RawOpsCalls)


def unknown_op(name: str) -> AttributeError:
    """Returns the error for an op that does not exist."""
    known = sorted(each for each in dir(RawOpsCalls) if each[0].isupper())
    similar = get_close_matches(name, known, n=1)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    return AttributeError(f"there is no raw op {name!r}.{hint} There are {', '.join(known)}", name=name)
