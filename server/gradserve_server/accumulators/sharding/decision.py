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

    def parts(self, rounds: Rounds) -> RoundParts:
        """Returns the gradients of the round that is about to end."""
        held = rounds.members.held
        if self.deterministic:
            held = sorted(held, key=lambda each: (each.worker_id, each.sequence))
        return RoundParts(
            self.incarnation,
            tuple([each.part for each in held]),
            tuple([each.weight for each in held]),
            lowest_step=_lowest_step(rounds),
            lowest_epoch=_lowest_epoch(rounds),
            sums=tuple([place for place, each in enumerate(held) if each.sum_of]),
        )


def as_of_now(parts: RoundParts, rounds: Rounds, kept: Iterable[Average]) -> RoundParts:
    """Returns the gradients of a round for an answer that is given now: with what servers may forget.

    Answers arrive at servers late, and in any order, so an answer says only what stays true: which rounds are over and
    no longer kept, and which gradients can be in no other round. A gradient counts in the epoch in which it was staged
    or not at all, and steps grow within an epoch.

    Args:
        parts: The gradients of the round.
        rounds: The rounds.
        kept: All averages that are kept.
    """
    earlier = [(each.round_number, each.parts) for each in kept if each.parts is not None]
    return replace(
        parts,
        oldest_round=min([rounds.current.number, *[number for number, _ in earlier]]),
        epoch=rounds.epoch,
        oldest_step=min([_lowest_step(rounds), *[each.lowest_step for _, each in earlier]]),
        oldest_epoch=min([_lowest_epoch(rounds), *[each.lowest_epoch for _, each in earlier]]),
    )


def _lowest_step(rounds: Rounds) -> int:
    return min([rounds.global_step, *[each.local_step for each in rounds.members.held]])


def _lowest_epoch(rounds: Rounds) -> int:
    return rounds.epoch if rounds.members.epoch is None else rounds.members.epoch


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
