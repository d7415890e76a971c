"""Whether an accumulator is sharded."""

from collections.abc import Iterable
from typing import Any

from gradserve.calls.accumulators.components import Component
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag
from gradserve.errors import InvalidArgumentError
from gradserve.wire.placement import dense_bytes

SMALLEST_BYTES = 1 << 20
"""The least size of the dense gradients of an accumulator that is sharded unasked.

Below it, the two round trips more cost as much as several links gain.
"""
_SHARDED = Argument("sharded")


def as_wish(sharded: Any) -> bool | None:
    """Returns the argument of a caller: True, False, or None for what is best.

    Raises:
        InvalidArgumentError: It is something else.
    """
    return None if sharded is None else as_flag(sharded, _SHARDED)


def is_sharded(wanted: bool | None, components: Iterable[Component], device: str | None) -> bool:
    """Returns whether to shard an accumulator over several servers.

    Args:
        wanted: What the caller wants; None for what is best.
        components: The components.
        device: The argument for the device of its sums.

    Raises:
        InvalidArgumentError: It is wanted, and not possible.
    """
    if wanted is False:
        return False
    everything = list(components)
    obstacle = _obstacle(everything, device)
    if wanted:
        if obstacle is not None:
            raise InvalidArgumentError(f"expected sharded=False or None, got True: {obstacle}", field=_SHARDED.name)
        return True
    return obstacle is None and sum(dense_bytes(each) for each in everything if not each.is_sparse) >= SMALLEST_BYTES


def _obstacle(components: list[Component], device: str | None) -> str | None:
    if device not in (None, "cpu"):
        return f"sums that are sharded are on 'cpu', and the device is {device!r}"
    for each in components:
        if each.shape is None or -1 in each.shape[each.is_sparse :] or (each.is_sparse and not each.shape):
            exception = ", but for the first size," if each.is_sparse else ""
            return f"its shapes{exception} have to be known, and {each.title} is {each}"
    return None
