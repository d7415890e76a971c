"""The home of a sharded accumulator: its ordered incarnations, and its decisions about rounds for the other servers."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias

from gradserve_server.accumulators.gradient import Average, Contribution, RoundParts
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError
from gradserve_server.limits import MAX_NAME_BYTES, check_length
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import ResourceKey, Tombstones

_NUMBER_DIGITS, _RANDOM_DIGITS = 16, 16
_PLACE_DIGITS = _NUMBER_DIGITS + _RANDOM_DIGITS
_ORDERED = re.compile(rf"[0-9a-f]{{{_PLACE_DIGITS},}}")
_MOST = 1 << 62
"""The limit of the numbers of incarnations: greater ones remain that fit into 63 bits."""


class OrderedIncarnations:
    """Makes the incarnations of sharded accumulators at their home.

    Each is later than all earlier ones of this server, including those that earlier runs have recorded. Without a state
    directory, the clock `now`, of nanoseconds since 1970, keeps them in order. Ids have hexadecimal digits.
    """

    def __init__(self, new_id: Callable[[], str], now: Callable[[], int], journals: AccumulatorJournals | None) -> None:
        self._new_id = new_id
        self._now = now
        self._journals = journals
        self._newest = 0 if journals is None else journals.newest_number

    def new(self) -> str:
        """Returns an incarnation that is later than all earlier ones."""
        self._newest = max(self._newest + 1, self._now())
        if self._journals is not None:
            self._journals.note_number(self._newest)
        return _with_number(self._new_id().zfill(_PLACE_DIGITS), self._newest)

    def restored(self, incarnation: str) -> None:
        """Notes the incarnation of a restored accumulator, whose home may have been another server."""
        self._newest = max(self._newest, min(_number_of(incarnation), _MOST - 1))


def is_incarnation(text: str) -> bool:
    """Returns True if a text looks like the incarnation of an accumulator."""
    return _ORDERED.fullmatch(text) is not None


def check_ordered(incarnation: str, field: str) -> None:
    """Checks that a text can be an incarnation made by a home.

    Raises:
        InvalidArgumentError: It cannot.
    """
    check_length(incarnation, MAX_NAME_BYTES, field)
    if _ORDERED.fullmatch(incarnation) is None or _number_of(incarnation) >= _MOST:
        given = repr(incarnation[:100]) if incarnation else "an empty one"
        raise InvalidArgumentError(f"expected the incarnation at the home, got {given}", field=field)


def is_later(first: str, second: str) -> bool:
    """Returns True if an incarnation is later than another one of the same accumulator."""
    return _place_of(first) > _place_of(second)


def latest_before(incarnation: str) -> str:
    """Returns an incarnation later than all that precede the given one."""
    return _with_number(incarnation[:-_RANDOM_DIGITS] + "f" * _RANDOM_DIGITS, _number_of(incarnation) - 1)


def later_incarnation(incarnation: str, new_id: str, now: int) -> str:
    """Returns an incarnation that is later than the given one, and than those that its home has made before now.

    Args:
        incarnation: The earlier one.
        new_id: An id that nothing else has.
        now: The time in nanoseconds since 1970.
    """
    return _with_number(new_id.zfill(_PLACE_DIGITS), min(max(_number_of(incarnation) + 1, now), _MOST - 1))


def check_is_of(incarnation: str, name: str, here: str, field: str) -> None:
    """Checks that a request is for the incarnation of a sharded accumulator that is here.

    Args:
        incarnation: The one that the request is for.
        name: The accumulator's name, for messages.
        here: The one that is here.
        field: The field of the request.

    Raises:
        InvalidArgumentError: No home can have made it.
        AbortedError: It is earlier than the one here.
        NotFoundError: It is later: the one here is a remnant, or the home has forgotten the later one.
    """
    check_ordered(incarnation, field)
    if is_later(here, incarnation):
        raise earlier(name, field)
    if here != incarnation:
        raise NotFoundError(f"this server has only an earlier accumulator {name!r}", field=field, code="GS_REPLACED")


def earlier(name: str, field: str, subject: str = "accumulator") -> AbortedError:
    """Returns the error for a request for an earlier accumulator than the one that is known here."""
    if subject == "accumulator":
        what, was, it, its = f"an accumulator {name!r}", "was", "it", "its"
    else:
        what, was, it, its = f"{subject} {name!r}", "were", "them", "their"
    return AbortedError(
        f"the call is for {what} that {was} deleted, as this server knows a later one. If not, the clock of "
        f"{its} home was set back: delete {it} and create {it} again",
        field=field,
        code="GS_CLOCK_SET_BACK",
    )


def is_of_earlier(error: AbortedError) -> bool:
    """Returns True for the errors of `earlier`, whose fields name the incarnation at the home."""
    return error.field is not None and error.field.rpartition(".")[2] == "home_incarnation"


def _place_of(incarnation: str) -> str:
    return incarnation[-_PLACE_DIGITS:]


def _number_of(incarnation: str) -> int:
    return int(incarnation[-_PLACE_DIGITS:-_RANDOM_DIGITS], 16)


def _with_number(id_: str, number: int) -> str:
    return f"{id_[:-_PLACE_DIGITS]}{max(number, 0):0{_NUMBER_DIGITS}x}{id_[-_RANDOM_DIGITS:]}"


_FIELD = "home_incarnation"
_MAX_DELETED = 10_000

_Deletion: TypeAlias = tuple[str, str, str]


class PartIncarnations:
    """Checks the incarnations of accumulators, or parameters, with other homes that requests name.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, member: Member | None, subject: str = "accumulator") -> None:
        """`subject` is what messages call them."""
        self._member = member
        self._subject = subject
        self._deleted: Tombstones[_Deletion] = Tombstones(_MAX_DELETED)
        """The latest deleted incarnations, so that a late request does not create parts of them again; by user, because
        names can be private."""

    def is_part(self, key: ResourceKey, num_shards: int) -> bool:
        """Returns True if another server is the home of an accumulator, so that this one can only have a part."""
        return bool(num_shards) and self._member is not None and not self._member.is_home(key)

    def check_creation(self, key: ResourceKey, num_shards: int, home_incarnation: str) -> None:
        """Checks that a request to create a part, and no other one, names the incarnation at the home.

        Raises:
            InvalidArgumentError: The incarnation is missing, malformed or not allowed.
        """
        if self.is_part(key, num_shards):
            check_ordered(home_incarnation, _FIELD)
        elif home_incarnation:
            raise InvalidArgumentError(
                f"expected none, as accumulator {str(key)!r} is made here, at its home, got {home_incarnation[:100]!r}",
                field=_FIELD,
            )

    def check_is_not_earlier(self, key: ResourceKey, here: str | None, home_incarnation: str) -> None:
        """Checks that this server knows no later incarnation than the one of a request.

        Args:
            key: The name.
            here: The incarnation of the part on this server; None if there is no part.
            home_incarnation: The incarnation of the request.

        Raises:
            AbortedError: It knows a later one.
        """
        deleted = self._deleted.reason(_deletion(key))
        if (here is not None and is_later(here, home_incarnation)) or (
            deleted is not None and not is_later(home_incarnation, deleted)
        ):
            raise earlier(str(key), _FIELD, self._subject)

    def delete_up_to(self, key: ResourceKey, home_incarnation: str) -> None:
        """Records the deletion of all incarnations up to this one.

        Raises:
            InvalidArgumentError: No home can have made it, or this server is the home.
        """
        check_ordered(home_incarnation, _FIELD)
        if self._member is None or self._member.is_home(key):
            raise InvalidArgumentError(
                f"expected none, as this is the home of {self._subject} {str(key)!r}, got {home_incarnation[:100]!r}",
                field=_FIELD,
            )
        before = self._deleted.reason(_deletion(key))
        if before is None or is_later(home_incarnation, before):
            self._deleted.put(_deletion(key), home_incarnation)


def _deletion(key: ResourceKey) -> _Deletion:
    return key.container, key.name, key.user.name


NUM_BYTES = 16


def part_id(call: RequestId) -> str:
    """Returns the id under which servers hold the gradient of a call: a digest in hexadecimal digits.

    Other clients see it, and must not learn the id of the client.
    """
    return blake2b(f"{call.sequence}\n{call.client_id}".encode(), digest_size=NUM_BYTES).hexdigest()


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
    """Returns the gradients of a round for a current answer, with what servers may forget.

    Answers reach servers late and in any order, so an answer has only lasting facts: which rounds are no longer kept,
    and which gradients can be in no other round. A gradient counts in the epoch in which it was staged or not at all,
    and steps only increase within an epoch.

    Args:
        parts: The gradients of the round.
        rounds: The rounds.
        kept: All kept averages.
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
        InvalidArgumentError: The call has no id, or has components, which belong in StageGradient.
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
