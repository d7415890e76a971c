"""Checks the arguments of calls that say nothing of values."""

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import InvalidArgumentError


def check_contribution(name: str, spec: AccumulatorSpec, contribution: Contribution) -> None:
    """Checks what a call says of its gradient for the accumulator `name`.

    Raises:
        InvalidArgumentError: The weight is not positive and finite, or a sum with a fixed order lacks the worker_id.
    """
    if not (0 < contribution.weight < float("inf")):
        raise InvalidArgumentError(f"expected a positive, finite weight, got {contribution.weight:g}", field="weight")
    if spec.deterministic and not contribution.worker_id:
        raise InvalidArgumentError(
            f"expected a worker_id for deterministic accumulator {name!r}, got an empty one", field="worker_id"
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
