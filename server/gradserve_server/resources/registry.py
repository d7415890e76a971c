"""Resources that live on the server under a container and a name, and ids for them."""

import bisect
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any, Generic, Protocol, TypeVar

from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gradserve_server.limits import MAX_NAME_BYTES, check_length
from gradserve_server.resources.lifetimes import SHARED, Life, Lifetime, Lifetimes
from gradserve_server.security.identity import ANONYMOUS, Identity

DEFAULT_CONTAINER = "default"

_MAX_TOMBSTONES = 10_000


@dataclass(frozen=True, order=True)
class ResourceKey:
    """The container and the name of a resource.

    Attributes:
        user: The identity that names it; not part of the key.
    """

    container: str
    name: str
    user: Identity = field(default=ANONYMOUS, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.container}/{self.name}"


class Resource(Protocol):
    """A named object on the server."""

    @property
    def incarnation(self) -> str:
        """An id that distinguishes it from earlier resources of the same name."""
        ...


ResourceT = TypeVar("ResourceT", bound=Resource)


@dataclass(frozen=True)
class _Entry(Generic[ResourceT]):
    resource: ResourceT
    life: Life
    tags: Collection[str]


Delete = Callable[[ResourceKey, str, str], object]
"""A function that deletes a resource whose lease has ended: takes its key, its incarnation, and the reason in words."""


def _never(_incarnation: str) -> bool:
    return False


class Directory(Generic[ResourceT]):
    """The existing resources of one kind, by name.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        kind: str,
        lifetimes: Lifetimes,
        delete: Delete,
        article: str = "an",
        is_of_another_run: Callable[[str], bool] = _never,
    ) -> None:
        """Makes an empty directory.

        Args:
            kind: The kind, which is also the field of requests that names a resource.
            lifetimes: The lifetimes of all resources of the server.
            delete: Deletes a resource whose lease has ended, with `remove`.
            article: The article of the kind, for messages.
            is_of_another_run: Returns whether an incarnation is of an earlier run of the server.
        """
        self._is_of_another_run = is_of_another_run
        self._kind = kind
        self._article = article
        self._lifetimes = lifetimes
        self._delete = delete
        self._entries: dict[ResourceKey, _Entry[ResourceT]] = {}
        self._tombstones: Tombstones[ResourceKey] = Tombstones(_MAX_TOMBSTONES)
        # Sorted names by container and tag, so that paging through many keeps nobody waiting. All have the empty tag.
        self._names: dict[tuple[str, str], list[str]] = {}

    def find(self, key: ResourceKey) -> ResourceT | None:
        """Returns the resource of this name, None if it does not exist.

        Raises:
            InvalidArgumentError: The name is empty, or a part of the key is too long.
            AlreadyExistsError: It is private, and out of the caller's reach.
        """
        entry = self._entry(key)
        if entry is None:
            return None
        if not _is_reached(entry, key.user):
            raise AlreadyExistsError(
                f"{self._kind} {str(key)!r} exists, private to somebody else",
                field=f"{self._kind}.name",
                code="GS_PRIVATE_NAME",
            )
        return entry.resource

    def _entry(self, key: ResourceKey) -> _Entry[ResourceT] | None:
        if not key.name:
            raise InvalidArgumentError(
                f"expected the name of {self._article} {self._kind}, got an empty one", field=f"{self._kind}.name"
            )
        found = self._entries.get(key)
        if found is None:
            check_length(key.container, MAX_NAME_BYTES, f"{self._kind}.container")
            check_length(key.name, MAX_NAME_BYTES, f"{self._kind}.name")
        return found

    def get(self, key: ResourceKey, incarnation: str = "") -> ResourceT:
        """Returns the resource of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: It does not exist, or is private and out of the caller's reach.
        """
        return self._found(key, incarnation).resource

    def _found(self, key: ResourceKey, incarnation: str) -> _Entry[ResourceT]:
        entry = self._entry(key)
        if entry is None or not _is_reached(entry, key.user):
            reason = self._tombstones.reason(key)
            lost = self._why_lost(incarnation)
            why = f" any more: {reason}" if reason is not None else lost and f" any more: it was deleted{lost}"
            raise NotFoundError(
                f"no {self._kind} {str(key)!r}{why}", field=f"{self._kind}.name", code="GS_NO_SUCH_NAME"
            )
        if incarnation not in ("", entry.resource.incarnation):
            raise NotFoundError(
                f"{self._kind} {str(key)!r} was deleted{self._why_lost(incarnation)}; another one has this name now",
                field=f"{self._kind}.incarnation",
                code="GS_REPLACED",
            )
        return entry

    def _why_lost(self, incarnation: str) -> str:
        if not self._is_of_another_run(incarnation):
            return ""
        return (
            ", or was lost when the server was started again: its durability was none, or the state was restored from "
            "a backup"
        )

    def use(self, key: ResourceKey, incarnation: str = "") -> "InUse[ResourceT]":
        """Finds a resource as `get` does, and keeps it from expiring during the block."""
        found = self._found(key, incarnation)
        return InUse(found.resource, found.life)

    def renew(self, key: ResourceKey) -> None:
        """Renews the leases of a resource that a call has named."""
        self._entries[key].life.renew()

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns the lifetime of an existing resource."""
        return self._entries[key].life.lifetime

    def is_reached(self, key: ResourceKey, user: Identity) -> bool:
        """Returns True if an existing resource is shared, or within a user's reach."""
        return _is_reached(self._entries[key], user)

    def check_lifetime(self, key: ResourceKey, lifetime: Lifetime) -> None:
        """Checks that an existing resource has the lifetime with which a call wants to create it.

        Raises:
            AlreadyExistsError: Its lifetime differs.
        """
        differences = self.lifetime(key).differences(lifetime)
        if differences:
            raise AlreadyExistsError(
                f"{self._kind} {str(key)!r} exists with another lifetime: {'; '.join(differences)}",
                field="lifetime",
                code="GS_OTHER_LIFETIME",
            )

    def add(
        self,
        key: ResourceKey,
        resource: ResourceT,
        lifetime: Lifetime = SHARED,
        tags: Collection[str] = frozenset(),
    ) -> None:
        """Adds a resource under a name.

        Args:
            key: The name, one that `find` did not find.
            resource: The resource.
            lifetime: The leases that can end it.
            tags: Tags to list it by: distinct and not empty.
        """
        life = self._lifetimes.begin(lifetime, partial(self._delete, key, resource.incarnation))
        self._entries[key] = _Entry(resource, life, tags)
        self._tombstones.remove(key)
        for tag in ("", *tags):
            bisect.insort(self._names.setdefault((key.container, tag), []), key.name)

    def remove(self, key: ResourceKey, incarnation: str = "", reason: str | None = None) -> ResourceT | None:
        """Removes and returns a resource, or returns None if it does not exist.

        Args:
            key: Its name.
            incarnation: The only incarnation to remove; empty for any.
            reason: The reason for later calls that name it; None if a call deleted it.

        Raises:
            InvalidArgumentError: The name is empty.
        """
        try:
            self.get(key, incarnation)
        except NotFoundError:
            return None
        entry = self._entries.pop(key)
        entry.life.end()
        if reason is not None:
            self._tombstones.put(key, reason)
        for tag in ("", *entry.tags):
            names = self._names[key.container, tag]
            del names[bisect.bisect_left(names, key.name)]
            if not names:
                del self._names[key.container, tag]
        return entry.resource

    def page(
        self,
        container: str,
        after: str,
        size: int,
        *,
        prefix: str = "",
        tag: str = "",
        user: Identity = ANONYMOUS,
    ) -> list[tuple[ResourceKey, ResourceT]]:
        """Returns up to `size` resources of a container whose names are greater than `after`, sorted by name.

        Args:
            container: Their namespace.
            after: The last name of the page before; empty for the first page.
            size: The most resources to return.
            prefix: The beginning of their names.
            tag: A tag that they have; empty for any.
            user: The caller, who sees nothing that is private and out of reach.
        """
        names = self._names.get((container, tag), [])
        start = max(bisect.bisect_right(names, after) if after else 0, bisect.bisect_left(names, prefix))
        keys = (ResourceKey(container, names[at]) for at in range(start, len(names)))
        begun = takewhile(lambda key: key.name.startswith(prefix), keys)
        found = ((key, self._entries[key]) for key in begun)
        seen = ((key, entry.resource) for key, entry in found if _is_reached(entry, user))
        return list(islice(seen, size))

    def all_owned(self) -> Iterator[tuple[ResourceKey, str, ResourceT]]:
        """Returns all resources, each with the id of the client that owns it ("" if shared), in no particular order.

        Others may be added or removed while the caller goes through them.
        """
        for key in list(self._entries):
            entry = self._entries.get(key)
            if entry is not None:
                yield key, entry.life.lifetime.owner, entry.resource

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[ResourceKey, ResourceT]]:
        return ((key, entry.resource) for key, entry in self._entries.items())


def _is_reached(entry: _Entry[Any], user: Identity) -> bool:
    owner = entry.life.lifetime.owner
    return not owner or user.reaches_id(owner)


class InUse(Generic[ResourceT]):
    """A resource that does not expire during a block. Made by `Directory.use`."""

    __slots__ = ("_life", "_resource")

    def __init__(self, resource: ResourceT, life: Life) -> None:
        self._resource = resource
        self._life = life

    def __enter__(self) -> ResourceT:
        """Returns the resource."""
        self._life.begin_use()
        return self._resource

    def __exit__(self, *_: object) -> None:
        """Lets it expire again."""
        self._life.end_use()


KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_KEY_LENGTH = 1024
_MAX_LENGTH = 1 << 20
"""The most characters of all keys."""


class Tombstones(Generic[KeyT]):
    """The latest reasons why resources were deleted other than by a call that named them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[KeyT, str] = OrderedDict()
        self._length = 0

    def put(self, key: KeyT, reason: str) -> None:
        """Remembers a reason in the place of the oldest, unless the key is too long for that."""
        if _length(key) > _MAX_KEY_LENGTH:
            return
        self.remove(key)
        self._reasons[key] = reason
        self._length += _length(key)
        while len(self._reasons) > self._capacity or self._length > _MAX_LENGTH:
            self._length -= _length(self._reasons.popitem(last=False)[0])

    def remove(self, key: KeyT) -> None:
        """Forgets a reason, because there is a new resource with this key."""
        if self._reasons.pop(key, None) is not None:
            self._length -= _length(key)

    def reason(self, key: KeyT) -> str | None:
        """Returns why a resource no longer exists, None if that is not known."""
        return self._reasons.get(key)


def _length(key: Hashable) -> int:
    return len(str(key))


_ID_BYTES = 16
_IDS_AT_ONCE = 256


class RandomIds:
    """Makes ids of 128 random bits, as 32 hexadecimal digits.

    Random bytes are read for many ids at a time. Each read gives other threads the interpreter, and with several of
    them at work it can take milliseconds to get it back.
    """

    def __init__(self) -> None:
        """Makes no id yet."""
        self._ids: list[str] = []

    def __call__(self) -> str:
        """Returns an id that nothing else has."""
        if not self._ids:
            digits = os.urandom(_IDS_AT_ONCE * _ID_BYTES).hex()
            self._ids = [digits[start : start + 2 * _ID_BYTES] for start in range(0, len(digits), 2 * _ID_BYTES)]
        return self._ids.pop()


_PREFIX_LENGTH = 8


class ServerRun:
    """Makes ids that tell what another run of the server made.

    Attributes:
        incarnation: The id of the run.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.incarnation = new_id()
        self._prefix = self.incarnation[:_PREFIX_LENGTH]
        self._length = len(self._prefix) + len(self.incarnation)

    def new_id(self) -> str:
        """Returns an id that nothing else has."""
        return self._prefix + self._new_id()

    def is_of_another(self, given: str) -> bool:
        """Returns True if an id has the form of those of a server, and is not of this run."""
        return len(given) == self._length and not given.startswith(self._prefix)
