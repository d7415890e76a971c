"""The placement of accumulators on the servers of a cluster: the home of each, and the plan of a sharded one.

All clients, and the servers when a cluster is resized, must compute the same placement on every platform. So plans use
integers only, and do not depend on the order of the components. docs/placement.md specifies both for clients in
other languages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeAlias

from gradserve_protocol.arrays import DType

DEFAULT_CONTAINER = "default"
SMALLEST_PIECE_BYTES = 64 << 10
"""The smallest piece of a component: for a smaller one, a message would cost more than the balance gains."""


def home_of(container: str, name: str, size: int) -> int:
    """Returns the index of an accumulator's home in a cluster of `size` servers.

    It is the server whose index hashes highest together with the name (rendezvous hashing): when a server joins, only
    the names that it takes over move. docs/placement.md specifies the hash for other languages.

    Args:
        container: The namespace; empty means "default".
        name: The name.
        size: The number of servers.
    """
    text = f"{container or DEFAULT_CONTAINER}\n{name}".encode()

    def weight(index: int) -> bytes:
        return blake2b(index.to_bytes(4, "little") + text, digest_size=8).digest()

    return max(range(size), key=weight)


class Component(Protocol):
    """One of the tensors of an accumulator. Hashable."""

    @property
    def name(self) -> str:
        """Its unique name."""

    @property
    def dtype(self) -> DType:
        """The dtype of its gradients."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; the first size may be -1 (unknown) if the component is sparse."""

    @property
    def is_sparse(self) -> bool:
        """True if its gradients are rows of a table, which is never split."""


class Piece(NamedTuple):
    """One server's part of a component; see Piece in the protos.

    Attributes:
        server: The index of the server.
        num_rows: The number of rows; 0 for the whole component.
    """

    server: int
    num_rows: int


Plan: TypeAlias = Mapping[str, Sequence[Piece]]
"""The pieces of each component, in row order."""


def plan_of(components: Iterable[Component], home: int, num_servers: int) -> Plan:
    """Returns a plan that balances the bytes of components over servers.

    Args:
        components: The components; only the first size of a sparse one may be unknown.
        home: The index of the accumulator's home.
        num_servers: The number of servers.
    """
    everything = list(components)
    dense = {each: dense_bytes(each) for each in everything if not each.is_sparse}
    tables = _table_bytes([each for each in everything if each.is_sparse])
    servers = _Servers([(home + place) % num_servers for place in range(num_servers)], sum(dense.values()))
    plan = {each.name: servers.pieces(each, num_bytes) for each, num_bytes in _largest_first(dense)}
    # Gradients of a large table are small: table sizes are comparable with each other, but not with dense components.
    servers = _Servers(servers.from_least_loaded(), sum(tables.values()))
    return plan | {each.name: servers.whole(num_bytes) for each, num_bytes in _largest_first(tables)}


def dense_bytes(component: Component) -> int:
    """Returns the size of a gradient of a dense component whose shape is known."""
    return math.prod(component.shape or ()) * component.dtype.itemsize


def _table_bytes(components: Sequence[Component]) -> dict[Component, int]:
    """Returns the sizes of the tables behind sparse components.

    A table with an unknown number of rows counts as long as the longest of the others.
    """
    shapes = {each: each.shape or (0,) for each in components}
    longest = max([shape[0] for shape in shapes.values() if shape[0] > 0], default=1)
    return {
        each: (longest if rows < 0 else rows) * math.prod(sizes) * each.dtype.itemsize
        for each, (rows, *sizes) in shapes.items()
    }


def _largest_first(sizes: Mapping[Component, int]) -> list[tuple[Component, int]]:
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0].name))


class _Servers:
    """The servers, with the bytes placed on each so far."""

    def __init__(self, order: Sequence[int], num_bytes: int) -> None:
        self._order = order
        self._share = -(-num_bytes // len(order))
        self._loads = [0] * len(order)
        """Bytes by place in the order."""

    def from_least_loaded(self) -> list[int]:
        """Returns the servers' indexes, least loaded first."""
        return [self._order[place] for place in self._places()]

    def whole(self, num_bytes: int) -> list[Piece]:
        """Places a component on the least loaded server."""
        place = self._loads.index(min(self._loads))
        self._loads[place] += num_bytes
        return [Piece(self._order[place], 0)]

    def pieces(self, component: Component, num_bytes: int) -> list[Piece]:
        """Places a component on one server, or splits its rows over several if it exceeds the free share of each.

        Args:
            component: A dense component.
            num_bytes: Its size.
        """
        rows = component.shape[0] if component.shape else 1
        if min(self._loads) + num_bytes <= self._share or rows < 2 or num_bytes < 2 * SMALLEST_PIECE_BYTES:
            return self.whole(num_bytes)
        counts = self._divided(rows, num_bytes // rows)
        is_whole = len(counts) == 1
        return [Piece(self._order[place], 0 if is_whole else count) for place, count in counts.items()]

    def _divided(self, rows: int, row_bytes: int) -> dict[int, int]:
        """Returns the number of rows for each place."""
        fewest = -(-SMALLEST_PIECE_BYTES // row_bytes)
        counts: dict[int, int] = {}
        left = rows
        for place in self._places():
            room = (self._share - self._loads[place]) // row_bytes
            if room < fewest or not left:
                break
            counts[place] = left if left - room < fewest else room
            left -= counts[place]
            self._loads[place] += counts[place] * row_bytes
        while left:
            # The rest exceeds every free share, but is too little to give each server a piece.
            places = self._places() if left >= fewest or not counts else sorted(counts, key=self._loads.__getitem__)
            count = min(left, fewest)
            counts[places[0]] = counts.get(places[0], 0) + count
            left -= count
            self._loads[places[0]] += count * row_bytes
        return counts

    def _places(self) -> list[int]:
        """Returns the places, least loaded first."""
        return sorted(range(len(self._loads)), key=self._loads.__getitem__)
