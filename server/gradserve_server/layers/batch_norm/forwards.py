"""The forwards of a layer that something is left to do for."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.errors import AbortedError, NotFoundError
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.spec import BackwardAttributes
from gradserve_server.tensors.quotas import Account, Quota

_REMEMBERED = 4096
"""The number of latest forwards of which a layer remembers whether they were counted."""


@dataclass(frozen=True)
class Moments:
    """What a forward feeds the moving averages with, each of shape [C], and how it was computed."""

    mean: Array
    variance: Array
    implementation: Implementation


@dataclass(frozen=True)
class Saved:
    """What a backward needs.

    Attributes:
        arrays: The fields of BackwardInputs but `outputs_gradient`, by name.
    """

    arrays: Mapping[str, Array]
    attributes: BackwardAttributes


@dataclass
class Fate:
    """What became of a forward.

    Attributes:
        was_counted: The moving averages follow it, or are to: they must not twice.
        is_spent: Its backward was computed, or will not be.
        draw: The number of its adjustment, if that was drawn.
    """

    was_counted: bool = False
    is_spent: bool = False
    draw: int | None = None


@dataclass(eq=False)
class Forward:
    """What is left of a forward. The same object as long as anything is, however often the call is repeated.

    Attributes:
        fate: What is remembered of it.
        saved: For its backward, while that is to come.
        claimed: Of `saved`, what the last backward is being computed with: no other can begin.
        pending: For its updates, while they wait to be run.
        lease: Seconds without use until it is forgotten.
    """

    forward_id: str
    fate: Fate
    account: Account
    saved: Saved | None = None
    claimed: Saved | None = None
    pending: Moments | None = None
    lease: float = 0.0
    expires: float = 0.0
    users: int = 0

    @property
    def can_begin(self) -> bool:
        """True if a backward can begin."""
        return self.saved is not None and self.saved is not self.claimed


@dataclass(eq=False)
class Room:
    """Memory and a handle for what a forward leaves; given back at the end, or when it is kept."""

    saved: Saved | None
    pending: Moments | None
    account: Account
    num_handles: int


class Forwards:
    """Keeps forwards while they have something left to do and their leases last.

    Attributes:
        num_bytes: The memory they hold.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        memory: Quota,
        handles: Quota,
        clock: Callable[[], float],
        on_presence: Callable[[bool], object] = lambda _: None,
    ) -> None:
        """Takes a monotonic `clock` in seconds, and what is told when there begins or ceases to be any forward."""
        self.num_bytes = 0
        self._memory = memory
        self._handles = handles
        self._clock = clock
        self._on_presence = on_presence
        self._forwards: dict[str, Forward] = {}
        self._fates: OrderedDict[str, Fate] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._forwards)

    def fate(self, forward_id: str) -> Fate:
        """Returns what became of a forward, to be kept up to date; of a new one, nothing yet."""
        kept = self._forwards.get(forward_id)
        fate = self._fates.get(forward_id, Fate()) if kept is None else kept.fate
        self._remember(forward_id, fate)
        return fate

    @contextmanager
    def room(self, saved: Saved | None, pending: Moments | None, reserved: Account | None = None) -> Iterator[Room]:
        """Takes the room for what a forward leaves, until the block ends: `add` in it cannot fail.

        Args:
            saved: For its backward.
            pending: For its updates.
            reserved: Memory that was reserved for all that the forward gives. What nothing is left of is given back.

        Raises:
            ResourceExhaustedError: It does not fit.
        """
        room = Room(saved, pending, Account(self._memory), int(saved is not None or pending is not None))
        reserved = reserved or Account(self._memory)
        room.account.take_over(_num_bytes(saved, pending), reserved)
        reserved.settle(0)
        try:
            self._handles.acquire(room.num_handles)
        except BaseException:
            room.account.settle(0)
            raise
        try:
            yield room
        finally:
            self._give_back(room)

    def add(self, forward_id: str, room: Room, lease: float) -> None:
        """Keeps what a forward left, in the place of what an earlier call with this id saved. Updates stay its own."""
        self._give_back(room)
        if self._closed or (room.saved is None and room.pending is None):
            return
        forward = self._forwards.get(forward_id)
        if forward is None:
            self._handles.acquire()
            forward = Forward(forward_id, self.fate(forward_id), Account(self._memory))
            self._forwards[forward_id] = forward
            if len(self._forwards) == 1:
                self._on_presence(True)
        if room.saved is not None:
            forward.saved, forward.fate.is_spent = room.saved, False
        if room.pending is not None:
            forward.pending = room.pending
        self._settle_memory(forward, _num_bytes(forward.saved, forward.pending))
        forward.lease, forward.expires = lease, self._clock() + lease

    def find(self, forward_id: str) -> Forward | None:
        """Returns a forward that has something left to do."""
        return self._forwards.get(forward_id)

    def get(self, forward_id: str) -> Forward:
        """Returns a forward whose backward is to come.

        Raises:
            NotFoundError: It is unknown, or its lease has ended.
            AbortedError: Its backward was computed, or is being, or it was released.
        """
        forward = self._forwards.get(forward_id)
        if forward is not None and forward.can_begin:
            return forward
        fate = self._fates.get(forward_id) if forward is None else forward.fate
        if (forward is not None and forward.claimed is not None) or (fate is not None and fate.is_spent):
            raise AbortedError(
                f"the gradients of forward {forward_id!r} were computed already, or it was released",
                field="forward_id",
            )
        raise NotFoundError(
            f"no forward {forward_id!r} is kept: it is unknown, did not keep what its gradients need, or its lease "
            "has ended",
            field="forward_id",
        )

    def pending(self, forward_ids: Iterable[str]) -> list[Forward]:
        """Returns those of the forwards whose updates wait; of all, oldest first, if none are named."""
        ids = list(dict.fromkeys(forward_ids)) or list(self._forwards)
        found = (self._forwards.get(forward_id) for forward_id in ids)
        return [forward for forward in found if forward is not None and forward.pending is not None]

    @contextmanager
    def use(self, forward: Forward, *, retain: bool) -> Iterator[None]:
        """Holds a forward while its backward is computed, and renews its lease.

        Unless it is to be retained, nobody else can begin its backward meanwhile, nor later unless this one fails.
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
        # A repeated forward may have saved anew meanwhile: that is for another backward.
        if not retain and forward.saved is saved:
            self.spend(forward)

    @contextmanager
    def hold(self, forward: Forward) -> Iterator[None]:
        """Holds a forward while its updates are run: it does not expire meanwhile."""
        forward.users += 1
        try:
            yield
        finally:
            forward.users -= 1

    def spend(self, forward: Forward) -> None:
        """Lets go of what the backward of a forward needs."""
        forward.saved, forward.fate.is_spent = None, True
        self._shrink(forward)

    def settle(self, forward: Forward) -> None:
        """Lets go of the updates of a forward: they were run."""
        forward.pending = None
        self._shrink(forward)

    def release(self, forward_ids: Iterable[str], *, with_updates: bool) -> int:
        """Lets go of what nobody needs; returns how many of the forwards there were."""
        count = 0
        for forward_id in forward_ids:
            forward = self._forwards.get(forward_id)
            if forward is not None:
                count += 1
                if with_updates:
                    forward.pending = None
                self.spend(forward)
        return count

    def expire(self) -> int:
        """Forgets those whose lease has run out and that nobody uses; returns how many."""
        now = self._clock()
        expired = [each for each in self._forwards.values() if each.expires <= now and each.users == 0]
        for forward in expired:
            if forward.pending is not None:
                # The averages will not follow it: should it be repeated, that is the first time.
                forward.fate.was_counted = False
            self._drop(forward)
        return len(expired)

    def close(self) -> None:
        """Forgets all, and keeps none any more."""
        self._closed = True
        for forward in list(self._forwards.values()):
            self._drop(forward)

    def _shrink(self, forward: Forward) -> None:
        """Gives back the memory of what was let go of, and the forward itself when nothing is left."""
        if forward.saved is None and forward.pending is None:
            self._drop(forward)
        elif self._forwards.get(forward.forward_id) is forward:
            self._settle_memory(forward, _num_bytes(forward.saved, forward.pending))

    def _drop(self, forward: Forward) -> None:
        if self._forwards.get(forward.forward_id) is forward:
            del self._forwards[forward.forward_id]
            self._handles.release()
            self._remember(forward.forward_id, forward.fate)
            if not self._forwards:
                self._on_presence(False)
        self._settle_memory(forward, 0)

    def _settle_memory(self, forward: Forward, num_bytes: int) -> None:
        """Makes `num_bytes` what a forward holds. The sum is kept: it is asked for often, and there can be many."""
        self.num_bytes += num_bytes - forward.account.used
        forward.account.settle(num_bytes)

    def _give_back(self, room: Room) -> None:
        room.account.settle(0)
        self._handles.release(room.num_handles)
        room.num_handles = 0

    def _remember(self, forward_id: str, fate: Fate) -> None:
        self._fates[forward_id] = fate
        self._fates.move_to_end(forward_id)
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)


def _num_bytes(saved: Saved | None, pending: Moments | None) -> int:
    """Returns the memory of what a forward left, each array counted once."""
    arrays = [] if saved is None else list(saved.arrays.values())
    arrays += [] if pending is None else [pending.mean, pending.variance]
    return sum({id(array): int(array.nbytes) for array in arrays}.values())
