"""Records of a layer: its events and state without the values of tensors, and its configuration, as JSON has them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ml_dtypes  # noqa: F401  (its dtypes have names from then on)
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.events import (
    AdjustmentDrawn,
    BackwardEnded,
    Event,
    ForwardEnded,
    ForwardsExpired,
    ForwardsReleased,
    Moments,
    Saved,
    UpdatesRun,
    VariablesCreated,
    VariablesSet,
)
from gradserve_server.layers.batch_norm.forwards import ForwardOutcome
from gradserve_server.layers.batch_norm.spec import Implementation
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.layers.batch_norm.variables import MovingAverages, Variables, averages_of, variables_of
from gradserve_server.layers.variables import Initializer, NamedInitializer, Regularizer, TensorInitializer
from gradserve_server.storage.journal import Durability, EventRecords, Record, Recording, record_of, value_of

NOTHING: NDArray[Any] = np.empty(0, np.float32)
"""Stands for every tensor of an event, whose values are stored elsewhere or not needed."""
_MOMENTS = Moments(NOTHING, NOTHING, Implementation.LEGACY)
_SAVED = Saved(is_training=True, implementation=Implementation.LEGACY, inputs=NOTHING, mean=NOTHING, variance=NOTHING)


class ArrayNumbers:
    """The arrays of one event, which its record refers to by number; each has one.

    Attributes:
        arrays: The arrays by number.
    """

    def __init__(self, arrays: Sequence[Array] = ()) -> None:
        self.arrays = list(arrays)
        self._numbers: dict[int, int] = {}

    def number(self, array: Array) -> int:
        """Returns the number of an array."""
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._numbers[id(array)]

    def array(self, number: int) -> Array:
        """Returns the array with a number."""
        return self.arrays[number]


class _NoArrays(ArrayNumbers):
    """Stands for the arrays of an event of which there is only the record."""

    def array(self, number: int) -> Array:
        return NOTHING


_EVENTS: Mapping[str, type[Event]] = {
    "variables_created": VariablesCreated,
    "variables_set": VariablesSet,
    "adjustment_drawn": AdjustmentDrawn,
    "forward_ended": ForwardEnded,
    "updates_run": UpdatesRun,
    "backward_ended": BackwardEnded,
    "forwards_released": ForwardsReleased,
    "forwards_expired": ForwardsExpired,
}


def event_records(arrays: ArrayNumbers) -> EventRecords[Event]:
    """Returns the conversion of one event, whose arrays get numbers or are found by them."""

    def numbered(values: Mapping[str, Array]) -> dict[str, int]:
        return {name: arrays.number(array) for name, array in values.items()}

    def found(numbers: Mapping[str, int]) -> dict[str, Array]:
        return {name: arrays.array(number) for name, number in numbers.items()}

    def named(variables: Variables | MovingAverages | None) -> Record | None:
        return None if variables is None else numbered(variables.by_name())

    def saved_record(saved: Saved | None) -> Record | None:
        if saved is None:
            return None
        implementation, values = saved.implementation.name, numbered(saved.by_field())
        return {"is_training": saved.is_training, "implementation": implementation, "arrays": values}

    def saved_of(record: Record | None) -> Saved | None:
        if record is None:
            return None
        implementation, values = Implementation[record["implementation"]], found(record["arrays"])
        return Saved(is_training=record["is_training"], implementation=implementation, **values)

    def moments_record(moments: Moments | None) -> Record | None:
        if moments is None:
            return None
        mean, variance = arrays.number(moments.mean), arrays.number(moments.variance)
        return {"mean": mean, "variance": variance, "implementation": moments.implementation.name}

    def moments_of(record: Record | None) -> Moments | None:
        if record is None:
            return None
        mean, variance = arrays.array(record["mean"]), arrays.array(record["variance"])
        return Moments(mean, variance, Implementation[record["implementation"]])

    return EventRecords(
        _EVENTS,
        {
            "variables": named,
            "values": numbered,
            "saved": saved_record,
            "pending": moments_record,
            "averages": named,
        },
        {
            "variables": lambda numbers: variables_of(found(numbers)),
            "values": found,
            "saved": saved_of,
            "pending": moments_of,
            "averages": lambda numbers: None if numbers is None else averages_of(found(numbers)),
        },
    )


def event_record(event: Event) -> Record:
    """Converts an event to a record without the values of its tensors; the reverse of `event_of`."""
    return event_records(ArrayNumbers()).record(event)


def event_of(record: Record) -> Event:
    """Converts a record to an event without the values of its tensors.

    Raises:
        DAMAGES: It is no such record.
    """
    return event_records(_NoArrays()).event(record)


def state_record(state: LayerState) -> Record:
    """Converts a state to a record; the reverse of `fill_state`."""
    return {
        "num_updates": state.num_updates,
        "num_draws": state.num_draws,
        "fates": [[forward_id, *_outcome_row(outcome)] for forward_id, outcome in state.forwards.outcomes],
        "forwards": [
            [each.forward_id, each.lease, each.saved is not None, each.pending is not None, *_outcome_row(each.outcome)]
            for each in state.forwards
        ],
    }


def fill_state(state: LayerState, record: Record) -> None:
    """Fills an empty state with that of a record.

    Raises:
        ValueError, TypeError, KeyError: It is no such record.
    """
    state.num_updates, state.num_draws = record["num_updates"], record["num_draws"]
    kept = []
    for forward_id, lease, is_saved, is_pending, *outcome in record["forwards"]:
        saved, pending = _SAVED if is_saved else None, _MOMENTS if is_pending else None
        kept.append(
            (ForwardEnded(forward_id=forward_id, lease=lease, saved=saved, pending=pending), ForwardOutcome(*outcome))
        )
    state.forwards.restore(kept, [(forward_id, ForwardOutcome(*outcome)) for forward_id, *outcome in record["fates"]])


def _outcome_row(outcome: ForwardOutcome) -> list[Any]:
    return [outcome.was_counted, outcome.is_spent, outcome.draw]


def _replay(state: LayerState, event: Event) -> None:
    if state.variables is None:
        raise ValueError("its variables are not there")
    state.replay(event)


LAYERS: Recording[Event, LayerState] = Recording(
    resource="layer",
    events="layer_event",
    snapshots="layer_state",
    event_record=event_record,
    event_of=event_of,
    state_record=state_record,
    fill_state=fill_state,
    apply=_replay,
)


def config_record(config: BatchNormConfig) -> Record:
    """Converts a configuration to a record; the reverse of `config_of`."""
    assert config.durability is not None, "the kind has chosen one"
    return record_of(
        config,
        {
            "param_initializers": lambda found: {name: _initializer_record(each) for name, each in found.items()},
            "param_regularizers": lambda found: {name: [each.name, dict(each.scales)] for name, each in found.items()},
            "variables_collections": dict,
            "renorm_clipping": dict,
            "adjustment": lambda adjustment: None if adjustment is None else asdict(adjustment),
        },
    )


def config_of(record: Record) -> BatchNormConfig:
    """Converts a record to a configuration.

    Raises:
        DAMAGES: It is no such record.
    """
    return value_of(
        BatchNormConfig,
        record,
        {
            "param_initializers": lambda found: {name: _initializer_of(each) for name, each in found.items()},
            "param_regularizers": lambda found: {name: Regularizer(*each) for name, each in found.items()},
            "variables_collections": lambda found: {name: tuple(tags) for name, tags in found.items()},
            "adjustment": lambda found: None if found is None else value_of(RandomAdjustment, found, {}),
            "durability": Durability,
        },
    )


def _initializer_record(initializer: Initializer) -> Record:
    if isinstance(initializer, NamedInitializer):
        return {"name": initializer.name, "parameters": dict(initializer.parameters), "seed": initializer.seed}
    tensor = initializer.tensor
    return {
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(tensor.tobytes()).decode(),
    }


def _initializer_of(record: Record) -> Initializer:
    if "name" in record:
        return NamedInitializer(record["name"], record["parameters"], record["seed"])
    content = base64.b64decode(record["bytes"], validate=True)
    return TensorInitializer(np.frombuffer(content, np.dtype(record["dtype"])).reshape(record["shape"]))
