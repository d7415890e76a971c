"""What the home of a sharded accumulator says of its rounds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradserve_server.accumulators.gradient import Average, Contribution, RoundParts
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.sharding.part_ids import part_id
from gradserve_server.errors import InvalidArgumentError


@dataclass(frozen=True)
class Decision:
    """Names the gradients of the rounds of one sharded accumulator.

    Attributes:
        incarnation: The incarnation of the accumulator.
        deterministic: Whether gradients are summed in the order of their workers, not of arrival.
    """

    incarnation: str
    deterministic: bool

    def parts(self, rounds: Rounds, kept: Iterable[Average]) -> RoundParts:
        """Returns the gradients of the round that is about to end.

        Args:
            rounds: The rounds.
            kept: The averages of earlier rounds that are kept.
        """
        held = rounds.members.held
        if self.deterministic:
            held = sorted(held, key=lambda each: (each.worker_id, each.sequence))
        lowest = min([rounds.global_step, *[each.local_step for each in held]])
        earlier = [(each.round_number, each.parts.lowest_step) for each in kept if each.parts is not None]
        return RoundParts(
            self.incarnation,
            tuple([each.part for each in held]),
            tuple([each.weight for each in held]),
            lowest_step=lowest,
            oldest_round=min([rounds.current.number, *[number for number, _ in earlier]]),
            oldest_step=min([lowest, *[step for _, step in earlier]]),
            sums=tuple([place for place, each in enumerate(held) if each.sum_of]),
        )


def of_staged(name: str, contribution: Contribution, call: RequestId | None, num_components: int) -> Contribution:
    """Returns a contribution to a sharded accumulator, whose gradient the servers hold under the id of its call.

    Raises:
        InvalidArgumentError: The call has no id, or has components, which the servers have.
    """
    if call is None:
        raise InvalidArgumentError(f"expected a request_id, as accumulator {name!r} is sharded", field="request_id")
    if num_components:
        raise InvalidArgumentError(
            f"expected no components, as accumulator {name!r} is sharded and StageGradient takes them, got "
            f"{num_components}",
            field="gradient",
        )
    return replace(contribution, part=part_id(call))
