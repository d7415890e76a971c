"""Decides whether an accumulator is sharded, divides gradients among its servers, and joins the parts of averages."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from gradserve.calls.accumulators.components import Component, Sent
from gradserve.conversion.plain import as_flag
from gradserve.results import Value
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray, host_array
from gradserve_protocol.errors import GradserveError, InvalidArgumentError
from gradserve_protocol.placement import Plan, dense_bytes
from gradserve_protocol.v1 import accumulator_pb2

SMALLEST_BYTES = 1 << 20
"""The least size of the dense gradients of an accumulator that is sharded unasked.

Below it, the two round trips more cost as much as several links gain.
"""
_SHARDED = Argument("sharded")
_FIELD = "gradient"


def as_wish(sharded: Any) -> bool | None:
    """Returns the argument of a caller: True, False, or None for what is best.

    Raises:
        InvalidArgumentError: It is something else.
    """
    return None if sharded is None else as_flag(sharded, _SHARDED)


def is_sharded(wanted: bool | None, components: Iterable[Component], device: str | None) -> bool:
    """Returns whether to shard an accumulator over several servers.

    Args:
        wanted: What the caller wants; None for what is best.
        components: The components.
        device: The argument for the device of its sums.

    Raises:
        InvalidArgumentError: It is wanted, and not possible.
    """
    if wanted is False:
        return False
    everything = list(components)
    obstacle = _obstacle(everything, device)
    if wanted:
        if obstacle is not None:
            raise InvalidArgumentError(f"expected sharded=False or None, got True: {obstacle}", field=_SHARDED.name)
        return True
    return obstacle is None and sum(dense_bytes(each) for each in everything if not each.is_sparse) >= SMALLEST_BYTES


def _obstacle(components: list[Component], device: str | None) -> str | None:
    if device not in (None, "cpu"):
        return f"sums that are sharded are on 'cpu', and the device is {device!r}"
    for each in components:
        if each.shape is None or -1 in each.shape[each.is_sparse :] or (each.is_sparse and not each.shape):
            exception = ", but for the first size," if each.is_sparse else ""
            return f"its shapes{exception} have to be known, and {each.title} is {each}"
    return None


def add_plan(spec: accumulator_pb2.AccumulatorSpec, plan: Plan, num_servers: int) -> None:
    """Makes the spec of an accumulator that of one that is sharded."""
    spec.num_shards = num_servers
    spec.device = "cpu"
    for component in spec.components:
        for server, num_rows in plan[component.name]:
            component.pieces.add(server=server, num_rows=num_rows)


class _Rows(NamedTuple):
    """Rows of a component, from `start` up to `stop`; the whole component if that is None."""

    start: int
    stop: int | None


class Parts:
    """Each server's part of the gradients and averages of an accumulator.

    Attributes:
        servers: The indexes of the servers that have something, in ascending order.
    """

    def __init__(self, components: Iterable[Component], plan: Plan) -> None:
        self._components = {each.name: each for each in components}
        self._rows: dict[int, dict[str, _Rows]] = {}
        for name in self._components:
            start = 0
            for server, num_rows in plan[name]:
                rows = _Rows(start, start + num_rows if num_rows else None)
                self._rows.setdefault(server, {})[name] = rows
                start += num_rows
        self.servers = sorted(self._rows)
        self._divided = [name for name, pieces in plan.items() if len(pieces) > 1]
        self._num_bytes = {
            server: sum(map(self._dense_bytes, rows, rows.values())) for server, rows in self._rows.items()
        }

    def num_bytes(self, server: int) -> int:
        """Returns the size of the dense tensors that a server has."""
        return self._num_bytes[server]

    def of_gradient(self, values: Mapping[str, Sent]) -> dict[int, dict[str, Sent]]:
        """Returns what each server gets of a gradient; rows of host memory are views.

        Args:
            values: The gradient: an array for each dense component, IndexedSlices for each sparse one.

        Raises:
            InvalidArgumentError: An array has not the shape of its component.
        """
        self._check_shapes(values)
        on_host = {name: host_array(cast("AnyArray", values[name])) for name in self._divided}
        return {
            server: {
                name: values[name] if stop is None else on_host[name][start:stop]
                for name, (start, stop) in rows.items()
            }
            for server, rows in self._rows.items()
        }

    def put_together(self, received: Mapping[int, Mapping[str, Value]], *, read_only: bool) -> dict[str, Value]:
        """Returns a whole average.

        Args:
            received: What each server has of it, by component.
            read_only: Whether arrays that are made for it are read-only, like those that were received.
        """
        values = {
            name: value for part in received.values() for name, value in part.items() if name not in self._divided
        }
        for name in self._divided:
            component = self._components[name]
            whole = np.empty(component.shape or (), component.dtype)
            for server, rows in self._rows.items():
                if name in rows:
                    whole[rows[name].start : rows[name].stop] = received[server][name]
            whole.flags.writeable = not read_only
            values[name] = whole
        return values

    def name_field(self, server: int, error: GradserveError) -> None:
        """Makes the field of an error name a component by its place in the whole gradient."""
        start, bracket, rest = (error.field or "").partition("[")
        place, _, after = rest.partition("]")
        if start == _FIELD and bracket and place.isdecimal() and int(place) < len(self._rows[server]):
            error.field = self._field(list(self._rows[server])[int(place)]) + after

    def _field(self, name: str) -> str:
        return f"{_FIELD}[{list(self._components).index(name)}]"

    def _dense_bytes(self, name: str, rows: _Rows) -> int:
        component = self._components[name]
        if component.is_sparse:
            return 0
        if rows.stop is None or not component.shape:
            return dense_bytes(component)
        return dense_bytes(component) // component.shape[0] * (rows.stop - rows.start)

    def _check_shapes(self, values: Mapping[str, Sent]) -> None:
        """Checks the shapes of dense components, with the message of a server that has them as a whole."""
        for name, component in self._components.items():
            if component.is_sparse:
                continue
            shape = cast("AnyArray", values[name]).shape
            if shape != component.shape:
                raise InvalidArgumentError(
                    f"Shape mismatch: expected {_shape_text(component.shape or ())}, got {_shape_text(shape)}",
                    field=f"{self._field(name)}.dense.shape",
                )


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
