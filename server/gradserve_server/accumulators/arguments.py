"""Checks the arguments of calls that say nothing of values."""

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import AbortedError, InvalidArgumentError

_WEIGHT_EXPONENTS = {
    "float16": (-14, 15),
    "bfloat16": (-64, 64),
    "float32": (-64, 64),
    "float64": (-512, 512),
}
"""The least and the largest weight, as powers of two, by the dtype of sums. There is room beside them for what they
are multiplied with: half of the exponents of the dtype, or all of those of float16."""


def check_contribution(name: str, spec: AccumulatorSpec, contribution: Contribution) -> None:
    """Checks what a call says of its gradient for the accumulator `name`.

    Raises:
        InvalidArgumentError: A weight is not positive and finite, or too small or too large for the sums; a sum with a
            fixed order lacks the worker_id; or there are sums of sparse gradients, whose rows are divided by the
            weights of those that have them.
    """
    for index, each in enumerate(contribution.sum_of):
        _check_weight(spec, each.weight, f"sum_of[{index}].weight")
    if contribution.sum_of:
        check_may_add(name, spec, "sum_of")
    _check_weight(spec, contribution.weight, "weight")
    if spec.deterministic and not contribution.worker_id:
        raise InvalidArgumentError(
            f"expected a worker_id for deterministic accumulator {name!r}, got an empty one", field="worker_id"
        )


def _check_weight(spec: AccumulatorSpec, weight: float, field: str) -> None:
    if weight == 1.0:
        return
    if not (0 < weight < float("inf")):
        raise InvalidArgumentError(f"expected a positive, finite weight, got {weight:g}", field=field)
    for dtype in {spec.sum_dtype(each) for each in spec.components}:
        exponents = _WEIGHT_EXPONENTS[dtype.name]
        least, most = (2.0**exponent for exponent in exponents)
        if not (least <= weight <= most):
            raise InvalidArgumentError(
                f"expected a weight from 2^{exponents[0]} to 2^{exponents[1]} ({least:.2g} to {most:.2g}) for "
                f"gradients that are summed in {dtype.name}, got {weight:g}. A mean depends only on the ratio of "
                "weights: multiply those of all workers by the same factor",
                field=field,
            )


def check_may_add(name: str, spec: AccumulatorSpec, field: str) -> None:
    """Checks that a gradient for the accumulator `name` may be a sum of several.

    Args:
        name: The accumulator's name.
        spec: Its spec.
        field: What says that it is one.

    Raises:
        InvalidArgumentError: There are sparse components, whose rows are divided by the weights of those that have
            them.
    """
    if len(spec.dense_components) < len(spec.components):
        raise InvalidArgumentError(
            f"expected gradients one by one for accumulator {name!r}, which has sparse components, got the sum of "
            "several",
            field=field,
        )


def check_num_required(num_required: int) -> None:
    """Checks how many gradients a call waits for, with TensorFlow's message.

    Raises:
        InvalidArgumentError: It is not positive.
    """
    if num_required <= 0:
        raise InvalidArgumentError(
            f"Argument num_required must be positive, but was {num_required}", field="num_required"
        )


def check_epoch(contribution: Contribution, epoch: int) -> None:
    """Checks that a gradient counts in the epoch in which it was staged: servers may have forgotten others.

    Raises:
        AbortedError: Another epoch has begun since.
    """
    if contribution.epoch not in (None, epoch):
        raise AbortedError(
            f"expected a gradient that was staged in epoch {epoch}, got one of epoch {contribution.epoch}: stage it "
            "again",
            field="epoch",
        )


def not_as_a_sum(reason: str) -> AbortedError:
    """Returns the error for a sum of gradients that do not all count: they can come one by one."""
    return AbortedError(f"{reason}: send the gradients of the sum one by one", field="sum_of")
