"""Whether an accumulator is sharded."""

from collections.abc import Iterable
from typing import Any

from gradserve.calls.accumulators.components import Component
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_flag
from gradserve.errors import InvalidArgumentError
from gradserve.wire.shard_plan import dense_bytes

SMALLEST_BYTES = 1 << 20
"""The least size of the dense gradients of an accumulator that is sharded unasked.

Below it, the two round trips more cost as much as several links gain.
"""
_SHARDED = Argument("sharded")


def is_sharded(wanted: Any, components: Iterable[Component], device: str | None, num_servers: int) -> bool:
    """Returns whether to shard an accumulator.

    Args:
        wanted: The argument of the caller: True, False, or None for what is best.
        components: The components.
        device: The argument for the device of its sums.
        num_servers: The number of the client's servers.

    Raises:
        InvalidArgumentError: It is wanted, and not possible.
    """
    flag = None if wanted is None else as_flag(wanted, _SHARDED)
    if flag is False or (flag is None and num_servers == 1):
        return False
    everything = list(components)
    obstacle = _obstacle(everything, device, num_servers)
    if flag:
        if obstacle is not None:
            raise InvalidArgumentError(f"expected sharded=False or None, got True: {obstacle}", field=_SHARDED.name)
        return True
    return obstacle is None and sum(dense_bytes(each) for each in everything if not each.is_sparse) >= SMALLEST_BYTES


def _obstacle(components: list[Component], device: str | None, num_servers: int) -> str | None:
    if num_servers == 1:
        return "the client has one server, and what is sharded is on several"
    if device not in (None, "cpu"):
        return f"sums that are sharded are on 'cpu', and the device is {device!r}"
    for each in components:
        if each.shape is None or -1 in each.shape[each.is_sparse :] or (each.is_sparse and not each.shape):
            exception = ", but for the first size," if each.is_sparse else ""
            return f"its shapes{exception} have to be known, and {each.title} is {each}"
    return None
