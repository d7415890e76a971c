"""What was asked of layers, answered and seen, and what has to follow from it, whatever crashed."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gradserve_server.layers.batch_norm.forwards import Forward as KeptForward
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardResult
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.simulation.clock import Moment
from tests.simulation.layers.moments import order_in
from tests.simulation.promises import check
from tests.simulation.server import REMEMBERED_FORWARDS


@dataclass(eq=False)
class Forward:
    """A forward of a client, however often it was sent.

    Attributes:
        forward_id: Its id.
        number: The channel of its batch.
        lease: The lease of what it leaves.
        begun: When the server began to work on the latest copy that it has answered, or was started.
        used: When a call that used it ended.
        num_using: The calls that use it now.
        drawn: The bits of its adjustment.
        later: Other forwards that the layer may remember in its place.
    """

    forward_id: str
    number: int
    lease: float
    begun: Moment | None = None
    used: Moment | None = None
    num_using: int = 0
    drawn: bytes | None = None
    later: set[int] = field(default_factory=set)

    @property
    def must_be_remembered(self) -> bool:
        """True if it cannot have been forgotten for others."""
        return len(self.later) < REMEMBERED_FORWARDS

    def __str__(self) -> str:
        return f"f{self.number} ({self.forward_id})"


@dataclass(eq=False)
class LayerLife:
    """One layer from its creation to its deletion.

    Attributes:
        is_promised: Whether its creation was answered.
        deleting: Whether somebody asked for its deletion.
        is_deleted: Whether that was answered.
        forwards: Its forwards, by number.
        numbers: Their numbers, by id.
        order: The forwards in the moving mean, in their order.
        counted: All that have been counted.
        pending: The bits of what pending updates need, by number.
        dropping: The forwards whose updates somebody wants to drop.
        dropped: Those for which that was answered.
        num_sets: How many calls want to set variables.
        values: The values of beta that are set by those that have arrived, and whether the moving mean is to be 0 then.
        seen: The values of beta that were seen.
        beta: The latest of them.
        num_updates: How many updates were counted.
        variables: The variables that were seen.
        hidden: How many of the updates a set of the mean to 0 has hidden at once.
    """

    key: ResourceKey
    incarnation: str
    durability: Durability
    in_place: bool
    draws: bool
    is_promised: bool = False
    deleting: bool = False
    is_deleted: bool = False
    forwards: dict[int, Forward] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    counted: set[int] = field(default_factory=set)
    pending: dict[int, bytes] = field(default_factory=dict)
    dropping: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    num_sets: int = 0
    values: dict[int, bool] = field(default_factory=dict)
    seen: set[int] = field(default_factory=lambda: {0})
    beta: int = 0
    num_updates: int = 0
    variables: Any = None
    hidden: int = 0

    # What happens

    def new_forward(self, forward_id: str, lease: float) -> Forward:
        """Returns a forward that nobody has sent yet."""
        forward = Forward(forward_id, len(self.forwards), lease)
        self.forwards[forward.number] = forward
        self.numbers[forward_id] = forward.number
        return forward

    def arrived(self, forward: Forward, kept: Collection[str]) -> None:
        """Notes that the server begins to work on a copy of a forward, while it keeps others."""
        for each in self.forwards.values():
            if each is not forward:
                each.later.add(forward.number)
                if each.num_using or each.forward_id in kept:
                    forward.later.add(each.number)

    def answered(self, forward: Forward, begun: Moment, result: ForwardResult) -> None:
        """Looks at the result of a forward in training, which the server has just finished."""
        forward.begun = begun
        number = forward.number
        is_known = number in self.counted or number in self.pending or number in self.dropping
        check(is_known or not forward.must_be_remembered, f"{forward} was answered, and does not count")
        if self.draws:
            assert result.drawn is not None
            drawn = b"".join(part.tobytes() for part in result.drawn)
            check(forward.drawn in (None, drawn) or not forward.must_be_remembered, f"{forward} has another adjustment")
            forward.drawn = drawn
        else:
            beta = float(result.outputs[0, number - 1])  # the mean of this channel is 0
            check(beta in self.seen, f"{forward} was computed with a beta of {beta}, which nobody has seen")

    def was_set(self, value: int) -> None:
        """Looks at the answer to a call that set variables."""
        check(value in self.seen, f"{self.key}: a beta of {value} was answered, but not seen")

    # What is seen

    def observe(self, layer: BatchNormLayer, now: Moment) -> None:
        """Looks at everything that anybody could see now."""
        pending = {self._number_of(each): each.pending for each in layer.forwards if each.pending is not None}
        if layer.variables is not self.variables:
            self._see_variables(layer)
        elif pending.keys() == self.pending.keys():
            return
        self._see_pending({number: _bits_of(moments) for number, moments in pending.items()}, now)

    def recovered(self, layer: BatchNormLayer, now: Moment) -> None:
        """Looks at what the next server has found."""
        check(all(each.saved is None for each in layer.forwards), f"{self.key}: what backwards need is there again")
        for each in self.forwards.values():
            each.begun, each.used, each.num_using = now, now, 0
        expired = set(self.pending) - self.counted - self.dropping
        self.observe(layer, now)
        lost = expired - set(self.pending) - self.counted
        check(not lost, f"{self.key}: the updates of {sorted(lost)} were pending before the crash")
        if layer.variables is not None:
            check(layer.num_updates == self.num_updates, f"{self.key}: {layer.num_updates} updates were counted")

    def check_leases(self, layer: BatchNormLayer, now: Moment) -> None:
        """Checks that nothing is kept of forwards whose leases ended long ago."""
        for kept in layer.forwards:
            forward = self.forwards[self._number_of(kept)]
            if forward.used is not None and not forward.num_using:
                is_over = now.must_have_ended(forward.lease, forward.used)
                check(not is_over, f"{forward} is kept since {forward.used.now:g}, longer than {forward.lease:g} s")

    def _number_of(self, kept: KeptForward) -> int:
        check(kept.forward_id in self.numbers, f"{self.key}: nobody sent the forward {kept.forward_id}")
        return self.numbers[kept.forward_id]

    def _see_variables(self, layer: BatchNormLayer) -> None:
        variables: Any = layer.variables
        check(variables is not None, f"{self.key}: the variables are gone")
        self.variables = variables
        named = variables.by_name()
        betas = set(named["beta"].tolist())
        check(len(betas) == 1, f"{self.key}: beta has the values of several calls: {betas}")
        beta = int(betas.pop())
        try:
            order = order_in(named["moving_mean"])
        except ValueError as error:
            check(False, f"{self.key}: {error}")
        is_reset = False
        if beta != self.beta:
            check(beta in self.values, f"{self.key}: nobody set beta to {beta}; it was {self.beta}")
            check(beta not in self.seen, f"{self.key}: beta is {beta} again, after {self.beta}")
            is_reset = any(resets for value, resets in self.values.items() if value not in self.seen)
            is_torn = self.values[beta] and self.order and order[: len(self.order)] == self.order
            check(not is_torn, f"{self.key}: beta was set to {beta}, but not the mean, which has {order}")
            self.beta = beta
            self.seen.add(beta)
        is_extended = order[: len(self.order)] == self.order
        check(is_extended or is_reset, f"{self.key}: the mean had {self.order}, and has {order}")
        fresh = order[len(self.order) :] if is_extended else order
        for number in fresh:
            self._count(number)
        added = layer.num_updates - self.num_updates
        is_right = added == len(fresh) or (is_reset and added > len(fresh))
        check(is_right, f"{self.key}: {len(fresh)} updates moved the mean, {added} were counted")
        self.order, self.num_updates, self.hidden = order, layer.num_updates, added - len(fresh)

    def _count(self, number: int) -> None:
        check(number in self.forwards, f"{self.key}: nobody sent f{number}, which was counted")
        forward = self.forwards[number]
        if forward.must_be_remembered:
            check(number not in self.counted, f"{self.key}: {forward} was counted twice")
            check(number not in self.dropped, f"{self.key}: {forward} was counted, though its update was dropped")
        self.counted.add(number)

    def _see_pending(self, pending: dict[int, bytes], now: Moment) -> None:
        hidden, self.hidden = self.hidden, 0
        for number in pending.keys() - self.pending.keys():
            forward = self.forwards[number]
            if forward.must_be_remembered:
                check(number not in self.counted, f"{self.key}: {forward} was counted, and its update is pending again")
        for number, bits in pending.items():
            check(self.pending.get(number, bits) == bits, f"{self.key}: what the update of f{number} needs has changed")
        for number in self.pending.keys() - pending.keys():
            forward = self.forwards[number]
            has_ended = number in self.counted or number in self.dropping
            if has_ended or forward.begun is None:
                continue
            has_expired = now.can_have_ended(forward.lease, forward.begun)
            if not has_expired and hidden:
                hidden -= 1
                self._count(number)
                continue
            check(has_expired, f"{self.key}: the update of {forward} has gone before the end of {forward.lease:g} s")
        self.pending = pending


def _bits_of(moments: Any) -> bytes:
    return bytes(moments.mean.tobytes() + moments.variance.tobytes())
