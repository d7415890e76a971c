"""Things that live on the server under a container and a name."""

import bisect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gradserve_server.errors import InvalidArgumentError, NotFoundError

DEFAULT_CONTAINER = "default"


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


class Directory(Generic[ResourceT]):
    """Finds resources of one kind.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, kind: str, article: str = "an") -> None:
        """Takes the `kind`, which is also the field of requests that names one, and its `article` for messages."""
        self._kind = kind
        self._article = article
        self._resources: dict[ResourceKey, ResourceT] = {}
        self._tags: dict[ResourceKey, Collection[str]] = {}
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
        return self._resources.get(key)

    def get(self, key: ResourceKey, incarnation: str = "") -> ResourceT:
        """Returns the resource of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: There is none.
        """
        found = self.find(key)
        if found is None:
            raise NotFoundError(f"no {self._kind} {str(key)!r}", field=f"{self._kind}.name")
        if incarnation not in ("", found.incarnation):
            raise NotFoundError(
                f"{self._kind} {str(key)!r} was deleted; the one of that name now is another",
                field=f"{self._kind}.incarnation",
            )
        return found

    def add(self, key: ResourceKey, resource: ResourceT, tags: Collection[str] = frozenset()) -> None:
        """Gives a resource a name that `find` did not find, and `tags` to list it by: different ones, none empty."""
        self._resources[key] = resource
        if tags:
            self._tags[key] = tags
        for tag in ("", *tags):
            bisect.insort(self._names.setdefault((key.container, tag), []), key.name)

    def remove(self, key: ResourceKey, incarnation: str = "") -> ResourceT | None:
        """Takes a resource out, if it is there, and returns it.

        Raises:
            InvalidArgumentError: The name is empty.
        """
        try:
            self.get(key, incarnation)
        except NotFoundError:
            return None
        for tag in ("", *self._tags.pop(key, ())):
            names = self._names[key.container, tag]
            del names[bisect.bisect_left(names, key.name)]
            if not names:
                del self._names[key.container, tag]
        return self._resources.pop(key)

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
        return [(key, self._resources[key]) for key in keys]

    def __iter__(self) -> Iterator[tuple[ResourceKey, ResourceT]]:
        return iter(self._resources.items())
