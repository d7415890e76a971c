"""The blocks of an endless sequence that have counted, and which block each worker takes in a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Blocks:
    """The state on which all workers at the same step agree. It changes with each round, and with nothing else.

    Workers of the last round take the first blocks that have not counted, in the order of their ids; all others take
    those behind, by their seats, which no two workers share. So no two workers take the same block in a step, and a
    block that did not count is taken again in the next step.

    Attributes:
        first: The first block that has not counted.
        ahead: The later blocks that have counted.
        members: The ids of the workers of the last round, sorted.
    """

    first: int = 0
    ahead: set[int] = field(default_factory=set)
    members: list[str] = field(default_factory=list)

    def block_of(self, worker_id: str, seats: Mapping[str, int]) -> int:
        """Returns the block of a worker in the coming round.

        Raises:
            KeyError: It was not in the last round, and has no seat.
        """
        is_member = worker_id in self.members
        rank = self.members.index(worker_id) if is_member else len(self.members) + seats[worker_id]
        block = self.first + rank
        for counted in sorted(self.ahead):
            if counted > block:
                break
            block += 1
        return block

    def end_round(self, worker_ids: Iterable[str], seats: Mapping[str, int]) -> None:
        """Notes the end of a round, in which the gradients of these workers counted, and so did their blocks."""
        members = sorted(set(worker_ids))
        self.ahead |= {self.block_of(each, seats) for each in members}
        while self.first in self.ahead:
            self.ahead.remove(self.first)
            self.first += 1
        self.members = members

    def has_counted(self, block: int) -> bool:
        """Returns whether a block has counted."""
        return block < self.first or block in self.ahead
