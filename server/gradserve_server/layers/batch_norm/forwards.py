"""The forwards of a layer that wait for their backward or update."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gradserve_server.errors import AbortedError, NotFoundError
from gradserve_server.layers.batch_norm.events import ForwardEnded, Moments, Saved, arrays_kept
from gradserve_server.limits import quoted
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.security.identity import owner_of
from gradserve_server.storage.journal import IdWindow

REMEMBERED_FORWARDS = 4096
"""The number of latest forwards whose outcome a layer remembers."""

_LOOKS = 1 << 12
"""The most expiries that are checked at once."""
_FEW = 64


@dataclass(frozen=True)
class ForwardOutcome:
    """The outcome of a forward.

    Attributes:
        was_counted: Whether the forward has updated the averages or will: this must happen only once.
        is_spent: Whether its backward was computed or is no longer needed.
        draw: The number of its adjustment, if one was drawn.
    """

    was_counted: bool = False
    is_spent: bool = False
    draw: int | None = None


@dataclass(eq=False)
class Forward:
    """The data kept for a forward: one object until nothing is left, however often the call is repeated.

    Attributes:
        outcome: What is remembered of the forward.
        room: Its share of the memory.
        place: Its share of the handles.
        saved: The data for its backward; None when no backward is expected.
        claimed: The `saved` of the last backward while it is being computed: no other backward can begin with it.
        pending: The data for its update; None when no update is pending.
        lease: Seconds without use until the forward is forgotten.
        expires: The time at which the forward expires unless it is used. It may become later at any time.
        users: The number of calls that use the forward, which does not expire while there are any.
        queued: The time at which `Expiries`, which owns this field, will check the forward.
    """

    forward_id: str
    outcome: ForwardOutcome
    room: Room
    place: Reservation
    saved: Saved | None = None
    claimed: Saved | None = None
    pending: Moments | None = None
    lease: float = 0.0
    expires: float = 0.0
    users: int = 0
    queued: float | None = None

    @property
    def can_begin(self) -> bool:
        """True if a backward can begin."""
        return self.saved is not None and self.saved is not self.claimed


class Forwards:
    """Keeps forwards until their backwards and updates are done or their leases end.

    Events alone determine what is kept and remembered, but not the current users and the times of use.

    Attributes:
        num_bytes: The bytes that the forwards hold.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        memory: Memory,
        handles: Budget,
        clock: Callable[[], float],
        *,
        remembered: int,
        on_presence: Callable[[bool], object] = lambda _: None,
        container: str | None = None,
    ) -> None:
        """Creates an empty collection.

        Args:
            memory: The memory of the server.
            handles: The budget of forwards kept.
            clock: A monotonic clock, in seconds.
            remembered: The number of latest forwards whose outcome is remembered.
            on_presence: Called with True when the first forward is kept, with False when none is left.
            container: The container whose budget the forwards use, together with that of their owner.
        """
        self.num_bytes = 0
        self._memory = memory
        self._handles = handles
        self._container = container
        self._clock = clock
        self._on_presence = on_presence
        self._forwards: dict[str, Forward] = {}
        self._ready: dict[str, tuple[Room, Reservation]] = {}
        """Reservations for forwards that end soon, by id; if calls with one id overlap, that of the latest."""
        self._outcomes: IdWindow[str, ForwardOutcome] = IdWindow(remembered)
        self._closed = False
        self._expiries: Expiries = Expiries()

    def __len__(self) -> int:
        return len(self._forwards)

    def __iter__(self) -> Iterator[Forward]:
        """Iterates over the forwards kept, oldest first."""
        return iter(self._forwards.values())

    @property
    def outcomes(self) -> tuple[tuple[str, ForwardOutcome], ...]:
        """The remembered outcomes by forward id, the latest last."""
        return tuple((forward_id, self.outcome(forward_id)) for forward_id in self._outcomes)

    def outcome(self, forward_id: str) -> ForwardOutcome:
        """Returns what became of a forward; an empty outcome if it is new."""
        kept = self._forwards.get(forward_id)
        return self._outcomes.get(forward_id) or ForwardOutcome() if kept is None else kept.outcome

    def find(self, forward_id: str) -> Forward | None:
        """Returns a forward that is kept, or None."""
        return self._forwards.get(forward_id)

    def get(self, forward_id: str) -> Forward:
        """Returns a forward whose backward is to come.

        Raises:
            NotFoundError: It is unknown, or its lease has ended.
            AbortedError: Its backward was computed or is being computed, or it was released.
        """
        forward = self._forwards.get(forward_id)
        if forward is not None and forward.can_begin:
            return forward
        if (forward is not None and forward.claimed is not None) or self.outcome(forward_id).is_spent:
            raise AbortedError(
                f"the gradients of forward {quoted(forward_id)} were computed already, or it was released",
                field="forward_id",
            )
        raise NotFoundError(
            f"no forward {quoted(forward_id)} is kept: it is unknown, did not keep what its gradients need, its lease "
            "has ended, or the server was started again since",
            field="forward_id",
            code="GS_NO_FORWARD",
        )

    def pending(self, forward_ids: Iterable[str]) -> list[Forward]:
        """Returns the named forwards with pending updates; if none are named all of them, oldest first."""
        ids = list(dict.fromkeys(forward_ids)) or list(self._forwards)
        found = (self._forwards.get(forward_id) for forward_id in ids)
        return [forward for forward in found if forward is not None and forward.pending is not None]

    def expired(self) -> tuple[str, ...]:
        """Returns the ids of unused forwards whose lease has expired, or some of them if there are many."""
        return tuple([each.forward_id for each in self._expiries.expired(self._clock())])

    @contextmanager
    def room(
        self, forward_id: str, saved: Saved | None, pending: Moments | None, reserved: Room | None = None
    ) -> Iterator[None]:
        """Reserves the memory and the handle that a forward needs when `add` keeps it, which takes them over.

        Args:
            forward_id: The id of the forward.
            saved: What its backward needs.
            pending: What its update needs.
            reserved: Memory reserved for all results of the forward. The rest is given back.

        Raises:
            ResourceExhaustedError: There is not enough room.
        """
        room, place = ready = self._reservations(forward_id)
        sizes = self._memory.sizes(arrays_kept(saved, pending))
        if reserved is None:
            room.grow(sizes)
        else:
            room.take_over(sizes, reserved)
            reserved.settle()
        try:
            place.grow(int(saved is not None or pending is not None))
            self._ready[forward_id] = ready
            yield
        finally:
            if self._ready.get(forward_id) is ready:
                del self._ready[forward_id]
            kept = self._forwards.get(forward_id)
            if kept is None or kept.room is not room:
                room.settle()
                place.settle(0)

    @contextmanager
    def use(self, forward: Forward, *, retain: bool) -> Iterator[None]:
        """Holds a forward while its backward is computed, and renews its lease.

        Without `retain`, no other backward of it can begin until the block ends.
        """
        saved = forward.saved
        forward.users += 1
        if not retain:
            forward.claimed = saved
        try:
            yield
        finally:
            forward.users -= 1
            forward.expires = self._clock() + forward.lease
            if not retain and forward.claimed is saved:
                forward.claimed = None

    @contextmanager
    def hold(self, forward: Forward) -> Iterator[None]:
        """Keeps a forward from expiring while its update is run."""
        forward.users += 1
        try:
            yield
        finally:
            forward.users -= 1

    def close(self) -> None:
        """Forgets all forwards and keeps no new ones."""
        self._closed = True
        for forward in list(self):
            self._drop(forward)

    # Applying events

    def draw(self, forward_id: str, number: int) -> None:
        """Remembers the number of the adjustment of a forward."""
        self._set_outcome(forward_id, replace(self.outcome(forward_id), draw=number))

    def add(self, event: ForwardEnded) -> None:
        """Keeps the data of a forward. It replaces what an earlier call with this id saved, but not its update."""
        outcome = self.outcome(event.forward_id)
        if event.pending is not None or event.averages is not None:
            outcome = replace(outcome, was_counted=True)
        self._set_outcome(event.forward_id, outcome)
        forward = self._forwards.get(event.forward_id)
        if self._closed or (forward is None and event.saved is None and event.pending is None):
            return
        if forward is None:
            ready = self._ready.get(event.forward_id)
            room, place = self._reservations(event.forward_id) if ready is None else ready
            forward = Forward(event.forward_id, outcome, room, place)
            self._forwards[event.forward_id] = forward
            self.num_bytes += room.used
            place.settle(1)
            if len(self) == 1:
                self._on_presence(True)
        if event.saved is not None:
            forward.saved, forward.outcome = event.saved, replace(outcome, is_spent=False)
        if event.pending is not None:
            forward.pending = event.pending
        self._settle_memory(forward, self._memory.sizes(arrays_kept(forward.saved, forward.pending)))
        forward.lease, forward.expires = event.lease, self._clock() + event.lease
        self._expiries.add(forward)

    def settle(self, forward_id: str) -> None:
        """Releases the update of a forward, which has been run."""
        forward = self._forwards.get(forward_id)
        if forward is not None:
            forward.pending = None
            self._shrink(forward)

    def spend(self, forward_id: str) -> None:
        """Releases what the backward of a forward needs."""
        forward = self._forwards.get(forward_id)
        if forward is not None:
            forward.saved, forward.outcome = None, replace(forward.outcome, is_spent=True)
            self._shrink(forward)

    def release(self, forward_ids: Iterable[str], *, with_updates: bool) -> int:
        """Releases what forwards keep for backwards, and maybe updates; returns how many were kept."""
        count = 0
        for forward_id in forward_ids:
            forward = self._forwards.get(forward_id)
            if forward is not None:
                count += 1
                if with_updates:
                    forward.pending = None
                self.spend(forward_id)
        return count

    def forget(self, forward_ids: Iterable[str]) -> int:
        """Forgets forwards; returns how many were kept."""
        found = [self._forwards[forward_id] for forward_id in forward_ids if forward_id in self._forwards]
        for forward in found:
            if forward.pending is not None:
                # It did not update the averages: a repeated call counts as the first.
                forward.outcome = replace(forward.outcome, was_counted=False)
            self._drop(forward)
        return len(found)

    # After a restart

    def restore(
        self, kept: Iterable[tuple[ForwardEnded, ForwardOutcome]], outcomes: Iterable[tuple[str, ForwardOutcome]]
    ) -> None:
        """Keeps forwards again, and remembers outcomes, both in this order."""
        for event, outcome in kept:
            self.add(event)
            self._set_outcome(event.forward_id, outcome)
        for forward_id, outcome in outcomes:
            self._set_outcome(forward_id, outcome)

    def lose_saved(self, pending: Mapping[str, Moments]) -> None:
        """Drops the data of backwards that were not computed before a restart.

        Args:
            pending: The data of the pending updates, by forward.

        Raises:
            ValueError: Other updates are pending.
        """
        expected = {each.forward_id for each in self if each.pending is not None}
        if expected != pending.keys():
            raise ValueError(f"expected {len(expected)} pending updates, got {len(pending)}, or others")
        outcomes = self.outcomes
        for forward in list(self):
            forward.saved, forward.pending = None, pending.get(forward.forward_id)
            self._shrink(forward)
        # Forwards that are no longer kept must not push newer ones out of the window.
        for forward_id, outcome in outcomes:
            self._set_outcome(forward_id, outcome)

    def _shrink(self, forward: Forward) -> None:
        """Gives back the memory of what was released, and drops the forward when nothing is left."""
        if forward.saved is None and forward.pending is None:
            self._drop(forward)
        else:
            self._settle_memory(forward, self._memory.sizes(arrays_kept(forward.saved, forward.pending)))

    def _drop(self, forward: Forward) -> None:
        del self._forwards[forward.forward_id]
        self._expiries.remove(forward)
        forward.place.settle(0)
        self._set_outcome(forward.forward_id, forward.outcome)
        self._settle_memory(forward, Sizes())
        if not self._forwards:
            self._on_presence(False)

    def _settle_memory(self, forward: Forward, sizes: Sizes) -> None:
        """Sets the bytes that a forward holds. The sum is stored: it is read often, and there can be many forwards."""
        self.num_bytes += sum(sizes) - forward.room.used
        forward.room.settle(sizes)

    def _reservations(self, forward_id: str) -> tuple[Room, Reservation]:
        """Returns the reservations of bytes and handles that a forward uses: those of its owner."""
        owner, container = owner_of(forward_id), self._container
        room = self._memory.room(Purpose.LAYERS, owner, container)
        return room, self._handles.reserve(owner=owner, container=container)

    def _set_outcome(self, forward_id: str, outcome: ForwardOutcome) -> None:
        if forward_id in self._forwards:
            self._forwards[forward_id].outcome = outcome
        self._outcomes.remember(forward_id, outcome)


class Expiries:
    """Forwards in the order of their expiry, without looking at all: each is checked about once per lease."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Forward]] = []
        self._tie_breaker = itertools.count()
        self._due: dict[int, Forward] = {}
        """Forwards whose time has come, but that may be in use, by their Python ids."""
        self._num_queued = 0

    def add(self, forward: Forward) -> None:
        """Adds a forward, or one that expires earlier than before."""
        if id(forward) in self._due or (forward.queued is not None and forward.queued <= forward.expires):
            return
        self._num_queued += forward.queued is None
        self._push(forward)

    def remove(self, forward: Forward) -> None:
        """Removes a forward that was dropped."""
        self._due.pop(id(forward), None)
        self._num_queued -= forward.queued is not None
        forward.queued = None
        if len(self._heap) > 2 * self._num_queued + _FEW:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Forward]:
        """Returns expired forwards that no call uses, or some of them if there are many. They stay until removed."""
        for _ in range(_LOOKS):
            if not self._heap or self._heap[0][0] > now:
                break
            at, _, forward = heapq.heappop(self._heap)
            if forward.queued != at:
                continue
            if forward.expires > now:
                self._push(forward)
            else:
                forward.queued = None
                self._num_queued -= 1
                self._due[id(forward)] = forward
        found = []
        for forward in list(self._due.values()):
            if forward.expires > now:
                del self._due[id(forward)]
                self.add(forward)
            elif not forward.users:
                found.append(forward)
        return found

    def _push(self, forward: Forward) -> None:
        forward.queued = forward.expires
        heapq.heappush(self._heap, (forward.expires, next(self._tie_breaker), forward))
