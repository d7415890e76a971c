"""The division of what is sharded among the servers of a cluster."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gradserve_protocol.arrays import DType
from gradserve_ray.states.movable import Rows
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec


@dataclass(frozen=True)
class Planned:
    """A component, for `plan_of`."""

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    is_sparse: bool


class Division:
    """The division of the rows of an accumulator, or of parameters, among servers.

    Attributes:
        rows: The rows of each component that a server has something of, in the order of the components, by server.
    """

    def __init__(self, spec: AccumulatorSpec) -> None:
        self.rows: dict[int, dict[str, Rows]] = {}
        for component in spec.components:
            num_rows, start = _rows_of(component), 0
            for server, count in component.pieces:
                rows = Rows(0, None) if num_rows is None else Rows(start, start + (count or num_rows))
                self.rows.setdefault(server, {})[component.name] = rows
                start += count

    @property
    def cuts(self) -> dict[str, set[int]]:
        """The first rows of all servers, by component."""
        found: dict[str, set[int]] = defaultdict(set)
        for held in self.rows.values():
            for name, rows in held.items():
                found[name].add(rows.start)
        return found

    def wanted(self, source: int, rows: Mapping[str, Rows]) -> dict[str, tuple[int, Rows]]:
        """Returns what a server has of some rows, by component, after the first row that it has."""
        found = {}
        for name, held in self.rows[source].items():
            if (want := rows.get(name)) is None:
                continue
            if held.stop is None or want.stop is None:
                found[name] = (0, held)
            elif (start := max(held.start, want.start)) < (stop := min(held.stop, want.stop)):
                found[name] = (held.start, Rows(start, stop))
        return found


def _rows_of(component: ComponentSpec) -> int | None:
    """Returns the rows of a component that can be divided, None of one that cannot."""
    dims = component.shape.dims
    return dims[0] or None if dims and not component.is_sparse else None
