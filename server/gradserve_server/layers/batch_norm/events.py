"""The events that change a layer, the data of forwards that they carry, and their serializable records.

Nothing but events changes a layer. They carry the values after a change, not how to compute them: a replay gives the
same bits on any machine. Their arrays are read-only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    Implementation,
)
from gradserve_server.layers.batch_norm.variables import MovingAverages, Variables, averages_of, variables_of


@dataclass(frozen=True)
class Moments:
    """The moments of a batch, each of shape [C], and the implementation that computed them."""

    mean: Array
    variance: Array
    implementation: Implementation


@dataclass(frozen=True, eq=False, kw_only=True)
class Saved:
    """The data of a forward that its backward needs; for the arrays see `BackwardInputs`."""

    is_training: bool
    implementation: Implementation
    inputs: Array
    mean: Array
    variance: Array
    beta: Array | None = None
    gamma: Array | None = None
    batch_weights: Array | None = None
    adjustment_scale: Array | None = None
    adjustment_bias: Array | None = None
    r: Array | None = None
    d: Array | None = None
    activation_saved: Array | None = None

    @classmethod
    def of(cls, inputs: ForwardInputs, outputs: ForwardOutputs, plan: ForwardPlan, *, is_training: bool) -> "Saved":
        """Returns what a forward with `saves` keeps.

        Args:
            inputs: The inputs, in the memory of the device.
            outputs: The results.
            plan: The plan of the forward.
            is_training: Whether the moments of the batch were used.
        """
        assert outputs.mean is not None
        assert outputs.variance is not None
        return cls(
            is_training=is_training,
            implementation=plan.implementation,
            inputs=inputs.inputs,
            mean=outputs.mean,
            variance=outputs.variance,
            beta=inputs.beta,
            gamma=inputs.gamma,
            batch_weights=inputs.batch_weights if plan.uses_weights else None,
            adjustment_scale=inputs.adjustment_scale if plan.uses_adjustment else None,
            adjustment_bias=inputs.adjustment_bias if plan.uses_adjustment else None,
            r=outputs.r,
            d=outputs.d,
            activation_saved=outputs.activation_saved,
        )

    def by_field(self) -> dict[str, Array]:
        """Returns the arrays that exist, by the names of the fields."""
        others = ("is_training", "implementation")
        return {name: array for name, array in vars(self).items() if name not in others and array is not None}

    def backward_inputs(self, outputs_gradient: Array) -> BackwardInputs:
        """Returns the inputs of the backward."""
        return BackwardInputs(outputs_gradient=outputs_gradient, **self.by_field())

    def backward_attributes(self, config: BatchNormConfig) -> BackwardAttributes:
        """Returns the attributes of the backward, in a layer with this configuration."""
        return BackwardAttributes(config, self.is_training, self.implementation)


def arrays_kept(saved: Saved | None, moments: Moments | None) -> list[Array]:
    """Returns the arrays that a forward keeps, each once."""
    arrays = [] if saved is None else list(saved.by_field().values())
    arrays += [] if moments is None else [moments.mean, moments.variance]
    return list({id(array): array for array in arrays}.values())


@dataclass(frozen=True, eq=False)
class VariablesCreated:
    """The variables were created, with their initial values."""

    variables: Variables


@dataclass(frozen=True, eq=False)
class VariablesSet:
    """A call set variables.

    Attributes:
        values: The new values, by TensorFlow's names relative to the scope.
    """

    values: Mapping[str, Array]


@dataclass(frozen=True)
class AdjustmentDrawn:
    """A random adjustment was drawn for a forward. A retry of the forward gets the same one.

    Attributes:
        forward_id: The id of the forward.
        number: The number of the draw, which decides scale and bias.
    """

    forward_id: str
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardEnded:
    """A forward ended that keeps something or updated the averages.

    Attributes:
        forward_id: The id of the forward.
        lease: Seconds without use after which the kept data is dropped.
        saved: What its backward needs, if one may come.
        pending: What the update of the moving averages needs, if it is pending.
        averages: The moving averages after an update in place; None if they did not move.
        released: Earlier forwards that need no backward any more.
    """

    forward_id: str
    lease: float
    saved: Saved | None = None
    pending: Moments | None = None
    averages: MovingAverages | None = None
    released: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class UpdatesRun:
    """The pending update of a forward was run.

    Attributes:
        forward_id: The id of the forward.
        averages: The moving averages now.
    """

    forward_id: str
    averages: MovingAverages


@dataclass(frozen=True)
class BackwardEnded:
    """The last backward of a forward was computed."""

    forward_id: str


@dataclass(frozen=True)
class ForwardsReleased:
    """Forwards were released: they need no backward any more.

    Attributes:
        forward_ids: The ids of the forwards; unknown ones are ignored.
        with_updates: Whether their pending updates were released, too.
    """

    forward_ids: tuple[str, ...]
    with_updates: bool


@dataclass(frozen=True)
class ForwardsExpired:
    """The leases of forwards have ended."""

    forward_ids: tuple[str, ...]


Event: TypeAlias = (
    VariablesCreated
    | VariablesSet
    | AdjustmentDrawn
    | ForwardEnded
    | UpdatesRun
    | BackwardEnded
    | ForwardsReleased
    | ForwardsExpired
)


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
        to_host: Returns an array of any memory in host memory.
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
    """Makes the record of one event; numbers each of its arrays once."""

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
