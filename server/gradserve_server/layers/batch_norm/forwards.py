"""The forwards of a layer that something is left to do for."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.errors import AbortedError, NotFoundError
from gradserve_server.layers.batch_norm.spec import BackwardAttributes
from gradserve_server.tensors.quotas import Account, Quota

_REMEMBERED = 4096
"""Of as many forwards a layer knows what became of them."""


@dataclass(frozen=True)
class Moments:
    """What a forward feeds the moving averages with, each of shape [C]."""

    mean: Array
    variance: Array


@dataclass(frozen=True)
class Saved:
    """What a backward needs.

    Attributes:
        arrays: The fields of BackwardInputs but `outputs_gradient`, by name.
    """

    arrays: Mapping[str, Array]
    attributes: BackwardAttributes

    @property
    def num_bytes(self) -> int:
        """The memory, each array counted once."""
        distinct = {id(array): array for array in self.arrays.values()}
        return sum(array.nbytes for array in distinct.values())


@dataclass(eq=False)
class Forward:
    """What is left of a forward.

    Attributes:
        saved: For its backward, while that is to come.
        pending: For its updates, while they wait to be run.
        lease: Seconds without use until it is forgotten.
    """

    forward_id: str
    saved: Saved | None
    pending: Moments | None
    lease: float
    account: Account
    expires: float = 0.0
    users: int = 0


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


class Forwards:
    """Keeps forwards while they have something left to do and their leases last.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, memory: Quota, handles: Quota, clock: Callable[[], float]) -> None:
        """Takes a monotonic `clock` in seconds."""
        self._memory = memory
        self._handles = handles
        self._clock = clock
        self._forwards: dict[str, Forward] = {}
        self._fates: OrderedDict[str, Fate] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._forwards)

    @property
    def num_bytes(self) -> int:
        """The memory they hold."""
        return sum(forward.account.used for forward in self._forwards.values())

    def fate(self, forward_id: str) -> Fate:
        """Returns what became of a forward, to be kept up to date; of a new one, nothing yet."""
        fate = self._fates.setdefault(forward_id, Fate())
        self._fates.move_to_end(forward_id)
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)
        return fate

    def add(self, forward_id: str, saved: Saved | None, pending: Moments | None, lease: float) -> None:
        """Keeps a forward, in the place of what an earlier call with this id left.

        Raises:
            ResourceExhaustedError: It does not fit; what was there is still there.
        """
        if self._closed or (saved is None and pending is None):
            return
        account = Account(self._memory)
        account.grow(0 if saved is None else saved.num_bytes)
        earlier = self._forwards.get(forward_id)
        if earlier is None:
            try:
                self._handles.acquire()
            except BaseException:
                account.settle(0)
                raise
        else:
            earlier.account.settle(0)
        forward = Forward(forward_id, saved, pending, lease, account, self._clock() + lease)
        self._forwards[forward_id] = forward

    def find(self, forward_id: str) -> Forward | None:
        """Returns a forward that has something left to do."""
        return self._forwards.get(forward_id)

    def get(self, forward_id: str) -> Forward:
        """Returns a forward whose backward is to come.

        Raises:
            NotFoundError: It is unknown, or its lease has ended.
            AbortedError: Its backward was computed, or it was released.
        """
        forward = self._forwards.get(forward_id)
        if forward is not None and forward.saved is not None:
            return forward
        if forward_id in self._fates and self._fates[forward_id].is_spent:
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
        saved, fate = forward.saved, self.fate(forward.forward_id)
        forward.users += 1
        if not retain:
            forward.saved, fate.is_spent = None, True
        try:
            yield
        except BaseException:
            if not retain and self._forwards.get(forward.forward_id) is forward:
                forward.saved, fate.is_spent = saved, False
            raise
        else:
            if not retain:
                self.spend(forward)
        finally:
            forward.users -= 1
            forward.expires = self._clock() + forward.lease

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
        forward.saved = None
        forward.account.settle(0)
        self.fate(forward.forward_id).is_spent = True
        self._drop_if_done(forward)

    def settle(self, forward: Forward) -> None:
        """Lets go of the updates of a forward: they were run."""
        forward.pending = None
        self._drop_if_done(forward)

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

    def discard(self, forward_id: str) -> None:
        """Forgets a forward, if it is there: the call that kept it failed."""
        forward = self._forwards.get(forward_id)
        if forward is not None:
            self._drop(forward)

    def expire(self) -> int:
        """Forgets those whose lease has run out and that nobody uses; returns how many."""
        now = self._clock()
        expired = [each for each in self._forwards.values() if each.expires <= now and each.users == 0]
        for forward in expired:
            self._drop(forward)
        return len(expired)

    def close(self) -> None:
        """Forgets all, and keeps none any more."""
        self._closed = True
        for forward in list(self._forwards.values()):
            self._drop(forward)

    def _drop_if_done(self, forward: Forward) -> None:
        if forward.saved is None and forward.pending is None:
            self._drop(forward)

    def _drop(self, forward: Forward) -> None:
        if self._forwards.get(forward.forward_id) is forward:
            del self._forwards[forward.forward_id]
            self._handles.release()
        forward.account.settle(0)
