"""Which server has what of a sharded accumulator.

Every client has to come to the same plan, on any platform, and so does the server when a cluster gets another size: it
is made of integers, and the order of the components does not matter. docs/many_servers.md specifies it for other
languages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from gradserve.wire.dtypes import DType

SMALLEST_PIECE_BYTES = 64 << 10
"""No smaller piece of a component is cut off: a message for it would cost more than the balance gains."""


class Component(Protocol):
    """One of the tensors of an accumulator. It can be hashed."""

    @property
    def name(self) -> str:
        """Its name, which no other has."""

    @property
    def dtype(self) -> DType:
        """The dtype of its gradients."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape. It is known, but for the first size of a sparse one, which is then -1."""

    @property
    def is_sparse(self) -> bool:
        """Whether its gradients are rows of a table, which stays whole."""


class Piece(NamedTuple):
    """What one server has of a component; see Piece in the protos.

    Attributes:
        server: The index of the server.
        num_rows: The number of rows; 0 for the whole component.
    """

    server: int
    num_rows: int


Plan: TypeAlias = Mapping[str, Sequence[Piece]]
"""The pieces of each component, in the order of their rows."""


def plan_of(components: Iterable[Component], home: int, num_servers: int) -> Plan:
    """Returns a plan that spreads components evenly over servers, by bytes.

    Args:
        components: The components. Their shapes are known, but for the first size of sparse ones.
        home: The index of the accumulator's home.
        num_servers: The number of servers.
    """
    everything = list(components)
    dense = {each: dense_bytes(each) for each in everything if not each.is_sparse}
    tables = _table_bytes([each for each in everything if each.is_sparse])
    servers = _Servers([(home + place) % num_servers for place in range(num_servers)], sum(dense.values()))
    plan = {each.name: servers.pieces(each, num_bytes) for each, num_bytes in _largest_first(dense)}
    # Gradients of a large table are small: its bytes say how tables compare, not what they add to dense components.
    servers = _Servers(servers.from_least_loaded(), sum(tables.values()))
    return plan | {each.name: servers.whole(num_bytes) for each, num_bytes in _largest_first(tables)}


def dense_bytes(component: Component) -> int:
    """Returns the size of a gradient of a dense component whose shape is known."""
    return math.prod(component.shape or ()) * component.dtype.itemsize


def _table_bytes(components: Sequence[Component]) -> dict[Component, int]:
    """Returns the sizes of the tensors that sparse components have rows of.

    Those with an unknown number of rows are as long as the longest of the others.
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
    """The servers, and the bytes that each of them has so far."""

    def __init__(self, order: Sequence[int], num_bytes: int) -> None:
        """Takes the servers' indexes, those that come first if they have equally much, and the bytes to share out."""
        self._order = order
        self._share = -(-num_bytes // len(order))
        self._loads = [0] * len(order)
        """By place in the order."""

    def from_least_loaded(self) -> list[int]:
        """Returns the servers' indexes, in the order of their bytes."""
        return [self._order[place] for place in self._places()]

    def whole(self, num_bytes: int) -> list[Piece]:
        """Gives a component to one server."""
        place = self._loads.index(min(self._loads))
        self._loads[place] += num_bytes
        return [Piece(self._order[place], 0)]

    def pieces(self, component: Component, num_bytes: int) -> list[Piece]:
        """Gives a component to one server, or its rows to several, if it is more than the share of one leaves room for.

        Args:
            component: The component, which is dense.
            num_bytes: Its size.
        """
        rows = component.shape[0] if component.shape else 1
        if min(self._loads) + num_bytes <= self._share or rows < 2 or num_bytes < 2 * SMALLEST_PIECE_BYTES:
            return self.whole(num_bytes)
        counts = self._divided(rows, num_bytes // rows)
        is_whole = len(counts) == 1
        return [Piece(self._order[place], 0 if is_whole else count) for place, count in counts.items()]

    def _divided(self, rows: int, row_bytes: int) -> dict[int, int]:
        """Returns how many rows each place gets."""
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
            # What is left is more than any share has room for, and less than a piece for each server.
            places = self._places() if left >= fewest or not counts else sorted(counts, key=self._loads.__getitem__)
            count = min(left, fewest)
            counts[places[0]] = counts.get(places[0], 0) + count
            left -= count
            self._loads[places[0]] += count * row_bytes
        return counts

    def _places(self) -> list[int]:
        """Returns the places, the least loaded first."""
        return sorted(range(len(self._loads)), key=self._loads.__getitem__)
