"""Things that live on the server under a container and a name."""

import bisect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gradserve_server.leases.lifetime import SHARED, Lifetime
from gradserve_server.leases.lifetimes import Life, Lifetimes
from gradserve_server.leases.tombstones import Tombstones

DEFAULT_CONTAINER = "default"

_MAX_TOMBSTONES = 10_000


@dataclass(frozen=True, order=True)
class ResourceKey:
    """Where something is found."""

    container: str
    name: str

    def __str__(self) -> str:
        return f"{self.container}/{self.name}"


class Resource(Protocol):
    """What has a name."""

    @property
    def incarnation(self) -> str:
        """Tells it from another one that had the name before."""
        ...


ResourceT = TypeVar("ResourceT", bound=Resource)


@dataclass(frozen=True)
class _Entry(Generic[ResourceT]):
    resource: ResourceT
    life: Life
    tags: Collection[str]


Delete = Callable[[ResourceKey, str, str], object]
"""Deletes a resource whose time has come: its key, its incarnation, and the reason in words."""


class Directory(Generic[ResourceT]):
    """Finds resources of one kind, as long as they live.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, kind: str, lifetimes: Lifetimes, delete: Delete, article: str = "an") -> None:
        """Takes what resources are, and what ends them.

        Args:
            kind: What they are; also the field of requests that names one.
            lifetimes: Those of all resources of the server.
            delete: Deletes a resource whose time has come, with `remove`.
            article: That of the kind, for messages.
        """
        self._kind = kind
        self._article = article
        self._lifetimes = lifetimes
        self._delete = delete
        self._entries: dict[ResourceKey, _Entry[ResourceT]] = {}
        self._tombstones: Tombstones[ResourceKey] = Tombstones(_MAX_TOMBSTONES)
        # Of each container and tag, sorted: a page of many must not keep others waiting. The empty tag is that of all.
        self._names: dict[tuple[str, str], list[str]] = {}

    def find(self, key: ResourceKey) -> ResourceT | None:
        """Returns the resource of this name, if there is one.

        Raises:
            InvalidArgumentError: The name is empty.
        """
        if not key.name:
            raise InvalidArgumentError(
                f"expected the name of {self._article} {self._kind}, got an empty one", field=f"{self._kind}.name"
            )
        entry = self._entries.get(key)
        return None if entry is None else entry.resource

    def get(self, key: ResourceKey, incarnation: str = "") -> ResourceT:
        """Returns the resource of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: There is none.
        """
        found = self.find(key)
        if found is None:
            reason = self._tombstones.reason(key)
            why = "" if reason is None else f" any more: {reason}"
            raise NotFoundError(f"no {self._kind} {str(key)!r}{why}", field=f"{self._kind}.name")
        if incarnation not in ("", found.incarnation):
            raise NotFoundError(
                f"{self._kind} {str(key)!r} was deleted; the one of that name now is another",
                field=f"{self._kind}.incarnation",
            )
        return found

    @contextmanager
    def use(self, key: ResourceKey, incarnation: str = "") -> Iterator[ResourceT]:
        """Finds a resource as `get` does, and keeps it from ending by itself until the end of the block."""
        found = self.get(key, incarnation)
        with self._entries[key].life.use():
            yield found

    def renew(self, key: ResourceKey) -> None:
        """Takes note that a resource was named by a call."""
        self._entries[key].life.renew()

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns what ends a resource that is there."""
        return self._entries[key].life.lifetime

    def check_lifetime(self, key: ResourceKey, lifetime: Lifetime) -> None:
        """Checks that a resource that is there has the lifetime that a call wants to create it with.

        Raises:
            AlreadyExistsError: It has another one.
        """
        differences = self.lifetime(key).differences(lifetime)
        if differences:
            raise AlreadyExistsError(
                f"{self._kind} {str(key)!r} exists with another lifetime: {'; '.join(differences)}", field="lifetime"
            )

    def add(
        self,
        key: ResourceKey,
        resource: ResourceT,
        lifetime: Lifetime = SHARED,
        tags: Collection[str] = frozenset(),
    ) -> None:
        """Gives a resource a name.

        Args:
            key: The name, one that `find` did not find.
            resource: What is to be found.
            lifetime: What ends it.
            tags: To list it by: different ones, none empty.
        """
        life = self._lifetimes.begin(lifetime, partial(self._delete, key, resource.incarnation))
        self._entries[key] = _Entry(resource, life, tags)
        self._tombstones.remove(key)
        for tag in ("", *tags):
            bisect.insort(self._names.setdefault((key.container, tag), []), key.name)

    def remove(self, key: ResourceKey, incarnation: str = "", reason: str | None = None) -> ResourceT | None:
        """Takes a resource out, if it is there, and returns it.

        Args:
            key: Its name.
            incarnation: Only this one; empty for any.
            reason: Why it is gone, for those who ask for it later; None for one that a call deleted.

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
        self, container: str, after: str, size: int, *, prefix: str = "", tag: str = ""
    ) -> list[tuple[ResourceKey, ResourceT]]:
        """Returns up to `size` resources of a container whose names come after `after`, by name.

        Args:
            container: Their namespace.
            after: Empty for the first page.
            size: How many at most.
            prefix: What their names begin with.
            tag: One that they have; empty for any.
        """
        names = self._names.get((container, tag), [])
        start = max(bisect.bisect_right(names, after) if after else 0, bisect.bisect_left(names, prefix))
        keys = (ResourceKey(container, name) for name in names[start : start + size] if name.startswith(prefix))
        return [(key, self._entries[key].resource) for key in keys]

    def __iter__(self) -> Iterator[tuple[ResourceKey, ResourceT]]:
        return ((key, entry.resource) for key, entry in self._entries.items())
