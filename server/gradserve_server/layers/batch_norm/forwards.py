"""The forwards of a layer whose backward or update is still to come."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gradserve_server.errors import AbortedError, NotFoundError
from gradserve_server.layers.batch_norm.events import ForwardEnded
from gradserve_server.layers.batch_norm.expiries import Expiries
from gradserve_server.layers.batch_norm.saved import Moments, Saved, arrays_kept
from gradserve_server.limits import quoted
from gradserve_server.resources.memory import DeviceMemory, Memories, Purpose, Room, Sizes
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import owner_of
from gradserve_server.state.id_window import IdWindow


@dataclass(frozen=True)
class Fate:
    """What became of a forward.

    Attributes:
        was_counted: Whether the averages were updated by the forward, or will be: it must not happen twice.
        is_spent: Whether its backward was computed or will not be.
        draw: The number of its adjustment, if one was drawn.
    """

    was_counted: bool = False
    is_spent: bool = False
    draw: int | None = None


@dataclass(eq=False)
class Forward:
    """What is kept of a forward: one object until nothing is left, however often the call is repeated.

    Attributes:
        fate: What is remembered of the forward.
        room: Its share of the memory.
        place: Its share of the handles.
        saved: What its backward needs, while that is to come.
        claimed: The `saved` that the last backward is being computed with: no other backward can begin with it.
        pending: What its update needs, while that is to come.
        lease: Seconds without use until the forward is forgotten.
        queued: See `Expiries`.
    """

    forward_id: str
    fate: Fate
    room: Room
    place: Account
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
    """Keeps forwards while their backwards or updates are to come and their leases last.

    What is kept and remembered follows from events alone; current users and times of use do not.

    Attributes:
        num_bytes: The bytes that the forwards hold.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        memory: Quota,
        handles: Quota,
        clock: Callable[[], float],
        *,
        remembered: int,
        on_presence: Callable[[bool], object] = lambda _: None,
        container: str | None = None,
        device: DeviceMemory | None = None,
    ) -> None:
        """Takes the quotas, and how much to remember.

        Args:
            memory: The quota of bytes.
            handles: The quota of forwards kept.
            clock: A monotonic clock, in seconds.
            remembered: The number of latest forwards whose fate is remembered.
            on_presence: Called with True when the first forward is kept, with False when none is left.
            container: The container in which forwards count, besides whom they belong to.
            device: The memory of the device; None if ops run on the host.
        """
        self.num_bytes = 0
        self._memories = Memories(memory, device, Purpose.LAYERS)
        self._handles = handles
        self._container = container
        self._clock = clock
        self._on_presence = on_presence
        self._forwards: dict[str, Forward] = {}
        self._fates: IdWindow[str, Fate] = IdWindow(remembered)
        self._closed = False
        self._expiries: Expiries[Forward] = Expiries()

    def __len__(self) -> int:
        return len(self._forwards)

    def __iter__(self) -> Iterator[Forward]:
        """Iterates over the forwards kept, oldest first."""
        return iter(self._forwards.values())

    @property
    def fates(self) -> tuple[tuple[str, Fate], ...]:
        """The remembered fates by forward id, the latest last."""
        return tuple((forward_id, self.fate(forward_id)) for forward_id, _ in self._fates)

    def fate(self, forward_id: str) -> Fate:
        """Returns what became of a forward; an empty fate if it is new."""
        kept = self._forwards.get(forward_id)
        return self._fates.recall(forward_id) or Fate() if kept is None else kept.fate

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
        if (forward is not None and forward.claimed is not None) or self.fate(forward_id).is_spent:
            raise AbortedError(
                f"the gradients of forward {quoted(forward_id)} were computed already, or it was released",
                field="forward_id",
            )
        raise NotFoundError(
            f"no forward {quoted(forward_id)} is kept: it is unknown, did not keep what its gradients need, its lease "
            "has ended, or the server was started again since",
            field="forward_id",
        )

    def pending(self, forward_ids: Iterable[str]) -> list[Forward]:
        """Returns the named forwards with pending updates; if none are named all of them, oldest first."""
        ids = list(dict.fromkeys(forward_ids)) or list(self._forwards)
        found = (self._forwards.get(forward_id) for forward_id in ids)
        return [forward for forward in found if forward is not None and forward.pending is not None]

    def expired(self) -> tuple[str, ...]:
        """Returns the ids of unused forwards whose lease has expired, or of some if there are many."""
        return tuple([each.forward_id for each in self._expiries.expired(self._clock())])

    @contextmanager
    def room(
        self, forward_id: str, saved: Saved | None, pending: Moments | None, reserved: Room | None = None
    ) -> Iterator[None]:
        """Reserves room for what a forward keeps until the block ends, so that there is enough to keep it then.

        Args:
            forward_id: The id of the forward.
            saved: What its backward needs.
            pending: What its update needs.
            reserved: Memory reserved for everything that the forward gives. What is not needed is given back.

        Raises:
            ResourceExhaustedError: There is not enough room.
        """
        room, place = self._accounts(forward_id)
        reserved = reserved or room.another()
        room.take_over(self._memories.sizes(arrays_kept(saved, pending)), reserved)
        reserved.settle()
        try:
            place.grow(int(saved is not None or pending is not None))
            yield
        finally:
            room.settle()
            place.settle(0)

    @contextmanager
    def use(self, forward: Forward, *, retain: bool) -> Iterator[None]:
        """Holds a forward while its backward is computed, and renews its lease.

        Without `retain`, no other backward of it can begin meanwhile.
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
        """Holds a forward while its update is run: it does not expire meanwhile."""
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
        self._set_fate(forward_id, replace(self.fate(forward_id), draw=number))

    def add(self, event: ForwardEnded) -> None:
        """Keeps what a forward left. What an earlier call with this id saved is replaced, its update is not."""
        fate = self.fate(event.forward_id)
        if event.pending is not None or event.averages is not None:
            fate = replace(fate, was_counted=True)
        self._set_fate(event.forward_id, fate)
        forward = self._forwards.get(event.forward_id)
        if self._closed or (forward is None and event.saved is None and event.pending is None):
            return
        if forward is None:
            forward = Forward(event.forward_id, fate, *self._accounts(event.forward_id))
            self._forwards[event.forward_id] = forward
            forward.place.settle(1)
            if len(self) == 1:
                self._on_presence(True)
        if event.saved is not None:
            forward.saved, forward.fate = event.saved, replace(fate, is_spent=False)
        if event.pending is not None:
            forward.pending = event.pending
        self._settle_memory(forward, self._memories.sizes(arrays_kept(forward.saved, forward.pending)))
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
            forward.saved, forward.fate = None, replace(forward.fate, is_spent=True)
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
                # The averages were not updated by it: a repeated call counts as the first.
                forward.fate = replace(forward.fate, was_counted=False)
            self._drop(forward)
        return len(found)

    # After a restart

    def restore(self, kept: Iterable[tuple[ForwardEnded, Fate]], fates: Iterable[tuple[str, Fate]]) -> None:
        """Keeps forwards again, and remembers fates, both in this order."""
        for event, fate in kept:
            self.add(event)
            self._set_fate(event.forward_id, fate)
        for forward_id, fate in fates:
            self._set_fate(forward_id, fate)

    def lose_saved(self, pending: Mapping[str, Moments]) -> None:
        """Releases what backwards need, though they have not been computed.

        Args:
            pending: What the updates need that are still to come, by forward.

        Raises:
            ValueError: Other updates are to come.
        """
        expected = {each.forward_id for each in self if each.pending is not None}
        if expected != pending.keys():
            raise ValueError(f"expected {len(expected)} pending updates, got {len(pending)}, or others")
        fates = self.fates
        for forward in list(self):
            forward.saved, forward.pending = None, pending.get(forward.forward_id)
            self._shrink(forward)
        # Those that are no longer kept must not make the window forget newer ones.
        for forward_id, fate in fates:
            self._set_fate(forward_id, fate)

    def _shrink(self, forward: Forward) -> None:
        """Gives back the memory of what was released, and drops the forward when nothing is left."""
        if forward.saved is None and forward.pending is None:
            self._drop(forward)
        else:
            self._settle_memory(forward, self._memories.sizes(arrays_kept(forward.saved, forward.pending)))

    def _drop(self, forward: Forward) -> None:
        del self._forwards[forward.forward_id]
        self._expiries.remove(forward)
        forward.place.settle(0)
        self._set_fate(forward.forward_id, forward.fate)
        self._settle_memory(forward, Sizes())
        if not self._forwards:
            self._on_presence(False)

    def _settle_memory(self, forward: Forward, sizes: Sizes) -> None:
        """Sets the bytes that a forward holds. The sum is stored: it is read often, and there can be many forwards."""
        self.num_bytes += sum(sizes) - forward.room.used
        forward.room.settle(sizes)

    def _accounts(self, forward_id: str) -> tuple[Room, Account]:
        """Returns accounts of bytes and handles for a forward, which counts for whoever made it."""
        of_maker = owner_of(forward_id), self._container
        return self._memories.room(*of_maker), Account(self._handles.part(*of_maker))

    def _set_fate(self, forward_id: str, fate: Fate) -> None:
        if forward_id in self._forwards:
            self._forwards[forward_id].fate = fate
        self._fates.remember(forward_id, fate)
