"""The state of a layer as records, without the values of tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.layers.batch_norm.events import Event, ForwardEnded
from gradserve_server.layers.batch_norm.forwards import Fate
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.records import Record, WrittenEvent, read_event, write_event
from gradserve_server.layers.batch_norm.saved import Moments, Saved
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.layers.batch_norm.variables import variables_of

_NOTHING: NDArray[Any] = np.empty(0, np.float32)
"""Stands for every tensor of an event: their values are elsewhere, or are not needed."""
_MOST_TENSORS = 64
_MOMENTS = Moments(_NOTHING, _NOTHING, Implementation.LEGACY)
_SAVED = Saved(
    is_training=True, implementation=Implementation.LEGACY, inputs=_NOTHING, mean=_NOTHING, variance=_NOTHING
)


def event_record(event: Event) -> Record:
    """Returns an event without the values of its tensors; the reverse of `event_of`."""
    return write_event(event, lambda _: _NOTHING).record


def event_of(record: Record) -> Event:
    """Returns the event of a record.

    Raises:
        ValueError, TypeError, KeyError, IndexError: It is no such record.
    """
    return read_event(WrittenEvent(record, (_NOTHING,) * _MOST_TENSORS))


def state_record(state: LayerState) -> Record:
    """Returns a state in types that JSON has; the reverse of `fill_state`."""
    return {
        "num_updates": state.num_updates,
        "num_draws": state.num_draws,
        "fates": [[forward_id, *_fate_row(fate)] for forward_id, fate in state.forwards.fates],
        "forwards": [
            [each.forward_id, each.lease, each.saved is not None, each.pending is not None, *_fate_row(each.fate)]
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
    for forward_id, lease, is_saved, is_pending, *fate in record["forwards"]:
        saved, pending = _SAVED if is_saved else None, _MOMENTS if is_pending else None
        kept.append((ForwardEnded(forward_id=forward_id, lease=lease, saved=saved, pending=pending), Fate(*fate)))
    state.forwards.restore(kept, [(forward_id, Fate(*fate)) for forward_id, *fate in record["fates"]])


def restore_state(
    state: LayerState,
    rows: Callable[..., list[tuple[Any, ...]]],
    number: int,
    variables: Mapping[str, NDArray[Any]],
    pending: Mapping[str, Moments],
) -> int:
    """Fills an empty state as it was when its server ended, but without what backwards need.

    Args:
        state: The state.
        rows: Returns the rows of a query.
        number: The number of the layer.
        variables: The values of its variables, by name; none if they were not created.
        pending: What its pending updates need, by forward.

    Returns:
        The position of the latest event.

    Raises:
        ServiceError, ValueError, TypeError, KeyError, IndexError: A record is damaged.
    """
    position = 0
    state.variables = variables_of(variables) if variables else None
    for found, record in rows("SELECT position, record FROM layer_state WHERE layer = ?", number):
        position = found
        fill_state(state, json.loads(record))
    events: Sequence[tuple[int, str]] = rows(
        "SELECT position, record FROM layer_event WHERE layer = ? AND position > ? ORDER BY position", number, position
    )
    for found, record in events:
        position = found
        event = event_of(json.loads(record))
        if state.variables is None:
            raise ValueError("its variables are not there")
        state.replay(event)
    # The events have no values.
    state.variables = variables_of(variables) if variables else None
    state.forwards.lose_saved(pending)
    return position


def _fate_row(fate: Fate) -> list[Any]:
    return [fate.was_counted, fate.is_spent, fate.draw]
