"""A store of tensors that says when they are used."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.held import Entry, HeldTensors
from gradserve_server.tensors.store import TensorStore


class Watch(Protocol):
    """Who is told of uses."""

    def begin_use(self, handles: Sequence[str], *, release: bool) -> None:
        """Notes that a call uses tensors, and wants to release them."""
        ...

    def end_use(self, handles: Sequence[str], *, release: bool, are_gone: bool) -> None:
        """Notes that it does not any more, and whether it has released them."""
        ...

    def renewed(self, handle: str) -> None:
        """Notes that the lease of a tensor begins again, as after each use, even one that failed."""
        ...


class WatchedStore(TensorStore):
    """A store of tensors.

    Attributes:
        watch: Who is told of uses, if anybody.
    """

    watch: Watch | None = None

    @asynccontextmanager
    async def use(
        self,
        handles: Sequence[str],
        *,
        release: bool = False,
        fields: Sequence[str] | None = None,
        user: Identity = ANONYMOUS,
    ) -> AsyncIterator[HeldTensors]:
        """See `TensorStore`."""
        async with super().use(handles, release=release, fields=fields, user=user) as held:
            if self.watch is None:
                yield held
                return
            self.watch.begin_use(handles, release=release)
            are_gone = False
            try:
                yield held
                are_gone = release
            finally:
                self.watch.end_use(handles, release=release, are_gone=are_gone)

    def _end_use(self, entry: Entry, *, keep: bool, release: bool) -> None:
        # A call that finds only some of its tensors renews their leases, too.
        super()._end_use(entry, keep=keep, release=release)
        if self.watch is not None:
            self.watch.renewed(entry.handle)
