"""Groups of parameters whose gradients are averaged together.

They depend on the model alone, so they are the same for all workers, however a worker's DistributedDataParallel packs
gradients into buckets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

_LEAST_BYTES = 4 << 20
"""A group of fewer bytes takes in the next parameter: below this, a call takes longer than the copying that it "
"saves."""
_MOST_GROUPS = 16
"""The most groups of a dtype: each is a call of its own, and all of them may wait for other workers at once."""
_ALIGNMENT = 64
"""The bytes to a multiple of which each member's place in a group is rounded up: a cache line."""


@dataclass(frozen=True)
class Member:
    """A parameter in a group.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        start: Where its gradient begins in the memory of the group, in bytes.
        num_bytes: The size of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype whose gradients are averaged by one call.

    Attributes:
        number: Its number among the groups.
        dtype: The dtype of the parameters.
        members: The parameters.
    """

    number: int
    dtype: torch.dtype
    members: tuple[Member, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the memory that holds all gradients of the group."""
        last = self.members[-1]
        return _rounded_up(last.start + last.num_bytes)


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
        members: list[Member] = []
        for index, (name, parameter) in enumerate(same):
            start = _rounded_up(members[-1].start + members[-1].num_bytes) if members else 0
            shape = tuple(parameter.shape)
            members.append(Member(name, shape, start, prod(shape) * parameter.element_size()))
            if start + members[-1].num_bytes >= enough or index == len(same) - 1:
                groups.append(Group(len(groups), dtype, tuple(members)))
                members = []
    return tuple(groups)


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
