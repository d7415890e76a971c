"""What clients have been given for a time, and when it has to end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradserve_server.resources.registry import ResourceKey
from tests.simulation.clock import Moment
from tests.simulation.promises import check
from tests.simulation.server import CLIENT_LEASE


@dataclass(eq=False)
class Lease:
    """A lease.

    Attributes:
        seconds: Its length.
        used: When it began, or the latest use ended.
        num_users: The calls that use it now.
    """

    seconds: float
    used: Moment
    num_users: int = 0

    def can_have_ended(self, now: Moment) -> bool:
        """Returns True if what it is for may be gone."""
        return not self.num_users and now.can_have_ended(self.seconds, self.used)

    def must_have_ended(self, now: Moment) -> bool:
        """Returns True if nothing may be left of what it is for."""
        return not self.num_users and now.must_have_ended(self.seconds, self.used)


@dataclass(eq=False)
class Tensor:
    """A stored tensor.

    Attributes:
        content: Its bytes.
        num_releasing: The calls that hide it now, as they want to release it.
    """

    lease: Lease
    content: bytes
    num_releasing: int = 0


@dataclass(eq=False)
class Owned:
    """An accumulator or layer that leases end.

    Attributes:
        owner: The client that it is private to; empty for none.
        idle_lease: Seconds without use until it ends; None for any number.
        is_durable: Whether it survives a crash.
        is_promised: Whether its creation was answered.
        deleting: Whether somebody asked for its deletion.
        is_deleted: Whether that was answered.
        is_alive: Whether it was there when the server was last looked at.
        leases: Those that can end it.
        forwards: The ids of forwards, of a layer.
    """

    key: ResourceKey
    incarnation: str
    owner: str
    idle_lease: float | None
    is_durable: bool
    is_promised: bool = False
    deleting: bool = False
    is_deleted: bool = False
    is_alive: bool = True
    leases: Sequence[Lease] = ()
    forwards: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return str(self.key)


class LeaseTruth:
    """The truth about leases.

    Attributes:
        tensors: The stored tensors, by handle.
        owned: All accumulators and layers that there ever were, by incarnation.
        clients: The leases of clients that own something.
        num_arriving: The calls that may be storing tensors now.
    """

    def __init__(self, moment: Callable[[], Moment]) -> None:
        """Takes the clock."""
        self.tensors: dict[str, Tensor] = {}
        self.owned: dict[str, Owned] = {}
        self.clients: dict[str, Lease] = {}
        self.num_arriving = 0
        self._moment = moment

    # What happens

    def created(self, owned: Owned) -> None:
        """Notes a new accumulator or layer, whose leases begin."""
        self.owned[owned.incarnation] = owned
        now = self._moment()
        leases = []
        if owned.owner:
            lease = self.clients.setdefault(owned.owner, Lease(CLIENT_LEASE, now))
            lease.used = now
            leases.append(lease)
        if owned.idle_lease is not None:
            leases.append(Lease(owned.idle_lease, now))
        owned.leases, owned.is_alive = leases, True

    @contextmanager
    def using(self, leases: Sequence[Lease]) -> Iterator[None]:
        """Notes that a call uses something during the block."""
        for lease in leases:
            lease.num_users += 1
        try:
            yield
        finally:
            for lease in leases:
                lease.num_users -= 1
                lease.used = self._moment()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Notes that a call may store tensors during the block."""
        self.num_arriving += 1
        try:
            yield
        finally:
            self.num_arriving -= 1

    def stored(self, handle: str, content: Any, seconds: float, begun: Moment) -> None:
        """Notes that a call that has begun to store a tensor at some moment has done so."""
        self.tensors[handle] = Tensor(Lease(seconds, begun), np.asarray(content).tobytes())

    def begin_use(self, handles: Sequence[str], *, release: bool) -> None:
        """See `Watch`."""
        for tensor in self._found(handles):
            tensor.lease.num_users += 1
            tensor.num_releasing += release

    def end_use(self, handles: Sequence[str], *, release: bool, are_gone: bool) -> None:
        """See `Watch`."""
        for tensor in self._found(handles):
            tensor.lease.num_users -= 1
            tensor.lease.used = self._moment()
            tensor.num_releasing -= release
        if are_gone:
            self.deleted(handles)

    def renewed(self, handle: str) -> None:
        """See `Watch`."""
        if handle in self.tensors:
            self.tensors[handle].lease.used = self._moment()

    def deleted(self, handles: Sequence[str]) -> None:
        """Notes that tensors were deleted."""
        for handle in handles:
            self.tensors.pop(handle, None)

    def is_there(self, handle: str) -> bool:
        """Returns True if a tensor must be found."""
        tensor = self.tensors.get(handle)
        return tensor is not None and not tensor.num_releasing

    def _found(self, handles: Sequence[str]) -> list[Tensor]:
        return [self.tensors[each] for each in dict.fromkeys(handles) if each in self.tensors]

    # What is seen

    def observe(self, stored: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """Looks at the tensors and at the accumulators and layers that are there, by handle and incarnation."""
        now = self._moment()
        if not self.num_arriving:
            unknown = stored.keys() - self.tensors.keys()
            check(not unknown, f"{len(unknown)} tensors are there that no call has left")
        for handle, tensor in list(self.tensors.items()):
            if handle not in stored and not tensor.num_releasing:
                check(tensor.lease.can_have_ended(now), f"tensor {handle}: it is gone; its lease {_text(tensor.lease)}")
                del self.tensors[handle]
        check(there.keys() <= self.owned.keys(), "something is there that nobody made")
        for owned in self.owned.values():
            if owned.is_alive and owned.incarnation not in there:
                has_ended = owned.deleting or any(lease.can_have_ended(now) for lease in owned.leases)
                check(has_ended, f"{owned}: it is gone; its leases {', '.join(map(_text, owned.leases))}")
                owned.is_alive = False
        with_something = {each.owner for each in self.owned.values() if each.is_alive}
        for client in list(self.clients):
            if client not in with_something:
                del self.clients[client]

    def check_ends(self, stored: Mapping[str, Any]) -> None:
        """Checks that nothing has outlived its lease."""
        now = self._moment()
        for handle in stored:
            if handle in self.tensors:
                lease = self.tensors[handle].lease
                check(not lease.must_have_ended(now), f"tensor {handle}: it is there; its lease {_text(lease)}")
        for owned in self.owned.values():
            for lease in owned.leases if owned.is_alive else ():
                check(not lease.must_have_ended(now), f"{owned}: it is there; its lease {_text(lease)}")

    def recovered(self, there: Mapping[str, Any]) -> None:
        """Looks at what the next server has found. Leases start over, and all tensors are gone."""
        self.tensors.clear()
        self.clients.clear()
        self.num_arriving = 0
        check(there.keys() <= self.owned.keys(), "something is there that nobody made")
        for owned in self.owned.values():
            is_found = owned.incarnation in there
            check(not (is_found and owned.is_deleted), f"{owned}: it was deleted, and is here again")
            must_be_found = owned.is_alive and owned.is_promised and owned.is_durable and not owned.deleting
            check(is_found or not must_be_found, f"{owned}: it is gone")
            if is_found:
                owned.deleting, owned.is_promised = False, True
                self.created(owned)
            else:
                owned.is_alive, owned.is_deleted = False, True


def _text(lease: Lease) -> str:
    """Returns the description of a lease, for messages."""
    return f"of {lease.seconds:g} s has {lease.num_users} users, the latest at {lease.used.now:g}"
