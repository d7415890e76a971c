"""Events of a layer as serializable records, with their tensors beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.averages import averages_of
from gradserve_server.layers.batch_norm.events import (
    AdjustmentDrawn,
    BackwardEnded,
    Event,
    ForwardEnded,
    ForwardsExpired,
    ForwardsReleased,
    UpdatesRun,
    VariablesCreated,
    VariablesSet,
)
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.saved import Moments, Saved
from gradserve_server.layers.batch_norm.variables import variables_of

Record: TypeAlias = dict[str, Any]
"""An event in types that every serialization format has; tensors are numbered from 0."""


@dataclass(frozen=True, eq=False)
class WrittenEvent:
    """An event that can be serialized.

    Attributes:
        record: The event.
        tensors: The tensors that the record refers to, in host memory.
    """

    record: Record
    tensors: tuple[NDArray[Any], ...]


def write_event(event: Event, to_host: Callable[[Array], NDArray[Any]]) -> WrittenEvent:
    """Returns an event as a record and tensors; `read_event` is the reverse.

    Args:
        event: The event.
        to_host: Returns an array in host memory, wherever it is now.
    """
    writer = _Writer()
    record = writer.record(event)
    return WrittenEvent(record, tuple(to_host(array) for array in writer.arrays))


def read_event(written: WrittenEvent) -> Event:
    """Returns the event of a record.

    Raises:
        ValueError: The kind of event is unknown.
    """
    return _Reader(written.tensors).event(written.record)


class _Writer:
    """Makes the record of one event, and numbers its arrays, each once."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._numbers: dict[int, int] = {}

    def record(self, event: Event) -> Record:
        match event:
            case VariablesCreated(variables):
                return {"event": "variables_created", "variables": self._named(variables.by_name())}
            case VariablesSet(values):
                return {"event": "variables_set", "values": self._named(values)}
            case AdjustmentDrawn(forward_id, number):
                return {"event": "adjustment_drawn", "forward_id": forward_id, "number": number}
            case ForwardEnded():
                return {
                    "event": "forward_ended",
                    "forward_id": event.forward_id,
                    "lease": event.lease,
                    "saved": None if event.saved is None else self._saved(event.saved),
                    "pending": None if event.pending is None else self._moments(event.pending),
                    "averages": None if event.averages is None else self._named(event.averages.by_name()),
                    "released": list(event.released),
                }
            case UpdatesRun(forward_id, averages):
                return {
                    "event": "updates_run",
                    "forward_id": forward_id,
                    "averages": self._named(averages.by_name()),
                }
            case BackwardEnded(forward_id):
                return {"event": "backward_ended", "forward_id": forward_id}
            case ForwardsReleased(forward_ids, with_updates):
                return {
                    "event": "forwards_released",
                    "forward_ids": list(forward_ids),
                    "with_updates": with_updates,
                }
            case ForwardsExpired(forward_ids):
                return {"event": "forwards_expired", "forward_ids": list(forward_ids)}

    def _saved(self, saved: Saved) -> Record:
        return {
            "is_training": saved.is_training,
            "implementation": saved.implementation.name,
            "arrays": self._named(saved.by_field()),
        }

    def _moments(self, moments: Moments) -> Record:
        return {
            "mean": self._number(moments.mean),
            "variance": self._number(moments.variance),
            "implementation": moments.implementation.name,
        }

    def _named(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        return {name: self._number(array) for name, array in arrays.items()}

    def _number(self, array: Array) -> int:
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._numbers[id(array)]


class _Reader:
    """Makes the event of one record."""

    def __init__(self, tensors: tuple[NDArray[Any], ...]) -> None:
        self._tensors = tensors

    def event(self, record: Record) -> Event:
        match record["event"]:
            case "variables_created":
                return VariablesCreated(variables_of(self._named(record["variables"])))
            case "variables_set":
                return VariablesSet(self._named(record["values"]))
            case "adjustment_drawn":
                return AdjustmentDrawn(record["forward_id"], record["number"])
            case "forward_ended":
                return ForwardEnded(
                    forward_id=record["forward_id"],
                    lease=record["lease"],
                    saved=None if record["saved"] is None else self._saved(record["saved"]),
                    pending=None if record["pending"] is None else self._moments(record["pending"]),
                    averages=None if record["averages"] is None else averages_of(self._named(record["averages"])),
                    released=tuple(record["released"]),
                )
            case "updates_run":
                return UpdatesRun(record["forward_id"], averages_of(self._named(record["averages"])))
            case "backward_ended":
                return BackwardEnded(record["forward_id"])
            case "forwards_released":
                return ForwardsReleased(tuple(record["forward_ids"]), record["with_updates"])
            case "forwards_expired":
                return ForwardsExpired(tuple(record["forward_ids"]))
            case other:
                raise ValueError(f"expected a known event, got {other!r}")

    def _saved(self, record: Record) -> Saved:
        return Saved(
            is_training=record["is_training"],
            implementation=Implementation[record["implementation"]],
            **self._named(record["arrays"]),
        )

    def _moments(self, record: Record) -> Moments:
        return Moments(
            self._tensors[record["mean"]],
            self._tensors[record["variance"]],
            Implementation[record["implementation"]],
        )

    def _named(self, numbers: Mapping[str, int]) -> dict[str, Array]:
        return {name: self._tensors[number] for name, number in numbers.items()}
