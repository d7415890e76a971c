"""Groups of parameters whose gradients are averaged together.

They depend on the model alone, so they are the same for all workers, however a worker's DistributedDataParallel packs
gradients into buckets.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_LEAST_BYTES = 4 << 20
"""A group of fewer bytes takes in the next parameter: below this, a call takes longer than the copying that it "
"saves."""
_MOST_GROUPS = 16
"""The most groups of a dtype: each is a call of its own, and all of them may wait for other workers at once."""


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype whose gradients are averaged by one call.

    Attributes:
        number: Its number among the groups.
        dtype: The dtype of the parameters.
        names: The names of the parameters.
    """

    number: int
    dtype: torch.dtype
    names: tuple[str, ...]


def groups_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[Group, ...]:
    """Returns the groups of a model's parameters, from the last parameter to the first: the order of a backward pass.

    Args:
        parameters: The names and parameters, in the model's order.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in reversed(list(parameters)):
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    groups: list[Group] = []
    for dtype, same in by_dtype.items():
        total = sum(parameter.nbytes for _, parameter in same)
        enough = max(_LEAST_BYTES, -(-total // _MOST_GROUPS))
        names: list[str] = []
        num_bytes = 0
        for index, (name, parameter) in enumerate(same):
            names.append(name)
            num_bytes += parameter.nbytes
            if num_bytes >= enough or index == len(same) - 1:
                groups.append(Group(len(groups), dtype, tuple(names)))
                names, num_bytes = [], 0
    return tuple(groups)
