"""The journal of a layer in a state directory, and the records of its state and its events."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.events import (
    AdjustmentDrawn,
    Event,
    ForwardEnded,
    ForwardsExpired,
    ForwardsReleased,
    Moments,
    Record,
    Saved,
    UpdatesRun,
    VariablesCreated,
    VariablesSet,
    WrittenEvent,
    read_event,
    write_event,
)
from gradserve_server.layers.batch_norm.forwards import ForwardOutcome
from gradserve_server.layers.batch_norm.spec import Implementation
from gradserve_server.layers.batch_norm.state import LayerJournal, LayerState
from gradserve_server.layers.batch_norm.variables import variables_of
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.storage.journal import NoJournal
from gradserve_server.storage.store import Change, Space, StateStore

_MOST_EVENTS = 10_000
"""Events after which the state is written, so that they can be deleted."""


_NOTHING: NDArray[Any] = np.empty(0, np.float32)
"""Stands for every tensor of an event, whose values are stored elsewhere or not needed."""
_MOST_TENSORS = 64
_MOMENTS = Moments(_NOTHING, _NOTHING, Implementation.LEGACY)
_SAVED = Saved(
    is_training=True, implementation=Implementation.LEGACY, inputs=_NOTHING, mean=_NOTHING, variance=_NOTHING
)


ToHost: TypeAlias = Callable[[Sequence[Array]], Awaitable[list[NDArray[Any]]]]
"""Returns arrays of any memory in host memory."""


class FileLayerJournal(LayerJournal):
    """Writes the changes of a layer to a state directory.

    Whatever clients can observe of a change is on disk before it takes effect: values of variables, pending updates and
    the ids of counted forwards. Whether a forward is kept, used or expired is written later, as a restart drops the
    data of forwards anyway.
    """

    def __init__(
        self,
        store: StateStore,
        number: int,
        to_host: ToHost,
        own: Callable[[Coroutine[Any, Any, None]], object],
        insert: Callable[[Change, Lifetime], None] = lambda _change, _lifetime: None,
        *,
        position: int = 0,
        variables: Mapping[str, int] | None = None,
        pending: Mapping[str, int] | None = None,
    ) -> None:
        """Creates the journal of a new layer, or of one that is in the directory already.

        Args:
            store: The state directory.
            number: The number of the layer there.
            to_host: Brings arrays to the host's memory.
            own: Runs a coroutine in the background.
            insert: Adds the layer itself to a change.
            position: The position of its latest event.
            variables: The blobs of its variables, by name.
            pending: The blobs of its pending updates, by forward.
        """
        super().__init__(NoJournal())
        self._number = number
        self._store = store
        self._to_host = to_host
        self._own = own
        self._insert = insert
        self._position = position
        self._num_events = 0
        """The events written since the state was."""
        self._variables = dict(variables or {})
        self._pending = dict(pending or {})
        self._blobs = {*self._variables.values(), *self._pending.values()}
        """All blobs that may exist."""
        self._state: LayerState | None = None
        self._held: list[tuple[Change, Space]] = []
        """Changes of a layer that is not visible yet."""
        self._ended = False

    def begin(self, lifetime: Lifetime, state: LayerState) -> None:
        """Writes the layer, and the changes that were held back until it became visible."""
        self._state = state
        change = Change()
        self._insert(change, lifetime)
        self._store.add(change)
        for held, _ in self._held:
            self._store.add(held)
        self._held = []

    def begin_again(self, state: LayerState) -> None:
        """Called after a restart. Writes the state, as it lost forwards and may no longer follow from the events."""
        self._state = state
        if self._position:
            self._store.add(self._state_change(json.dumps(state_record(state)), self._position))

    async def append(self, event: Event) -> None:
        """Returns once an event is written or, if clients cannot notice it, is going to be."""
        values, moments = _values_of(event), _moments_of(event)
        arrays = await self._to_host([*values.values(), *moments])
        if self._ended:
            return
        if self._num_events >= _MOST_EVENTS and self._state is not None:
            self._num_events = 0
            # The events up to here have led to the state as it is now.
            self._own(self._write_state(state_record(self._state), self._position))
        change = Change()
        if not isinstance(event, VariablesCreated | VariablesSet):
            self._execute(change, event)
        variables = self._put_variables(change, dict(zip(values, arrays, strict=False))) if values else self._variables
        added = self._put_pending(change, event, arrays[len(values) :])
        dropped = self._drop_pending(change, event)
        if self._state is None:
            await self._hold(change)
        elif _is_noticed(event):
            await _to_the_end(self._store.commit(change))
        else:
            self._store.add(change)
        self._variables = variables
        self._pending |= added
        for forward_id in dropped:
            del self._pending[forward_id]
        self._blobs.difference_update(change.removed)

    def end(self) -> None:
        """Removes the layer from the directory, and gives back the space of changes that were held back."""
        self._ended = True
        change = Change()
        if self._state is not None:
            change.execute("DELETE FROM layer WHERE id = ?", self._number)
            change.remove(self._blobs)
        for held, space in self._held:
            # An empty blob, so that all the space is given back.
            blob = held.arrays[0].number
            change.put(blob, [], space)
            change.remove([blob])
        self._held = []
        self._store.add(change)

    async def _hold(self, change: Change) -> None:
        """Holds a change back until the layer begins, and reserves the space for it."""
        for each in change.arrays:
            each.space = await self._store.reserve(sum(array.nbytes for array in each.arrays))
            if self._ended:
                unused = Change()
                unused.give_back(each.space)
                self._store.add(unused)
                return
            self._held.append((change, each.space))

    def _put_variables(self, change: Change, values: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        blob = self._new_blob(change, list(values.values()))
        for index, name in enumerate(values):
            change.execute(
                "INSERT OR REPLACE INTO layer_variable (layer, name, place, blob) VALUES (?, ?, ?, ?)",
                *(self._number, name, index, blob),
            )
        after = self._variables | dict.fromkeys(values, blob)
        change.remove(set(self._variables.values()).difference(after.values()))
        return after

    def _put_pending(self, change: Change, event: Event, arrays: Sequence[NDArray[Any]]) -> dict[str, int]:
        if not isinstance(event, ForwardEnded) or event.pending is None:
            return {}
        blob = self._new_blob(change, arrays)
        change.execute(
            "INSERT INTO layer_update (layer, forward, implementation, blob) VALUES (?, ?, ?, ?)",
            *(self._number, event.forward_id, event.pending.implementation.name, blob),
        )
        return {event.forward_id: blob}

    def _drop_pending(self, change: Change, event: Event) -> list[str]:
        dropped = [each for each in dict.fromkeys(_dropped_by(event)) if each in self._pending]
        for forward_id in dropped:
            change.execute("DELETE FROM layer_update WHERE layer = ? AND forward = ?", self._number, forward_id)
            change.remove([self._pending[forward_id]])
        return dropped

    def _new_blob(self, change: Change, arrays: Sequence[NDArray[Any]]) -> int:
        blob = self._store.new_blob()
        change.put(blob, arrays)
        # Before it is written, as the layer may be deleted in the meantime.
        self._blobs.add(blob)
        return blob

    def _execute(self, change: Change, event: Event) -> None:
        self._position += 1
        self._num_events += 1
        change.execute(
            "INSERT INTO layer_event (layer, position, record) VALUES (?, ?, ?)",
            *(self._number, self._position, json.dumps(event_record(event))),
        )

    async def _write_state(self, record: dict[str, Any], position: int) -> None:
        text = await asyncio.to_thread(json.dumps, record)
        if not self._ended:
            self._store.add(self._state_change(text, position))

    def _state_change(self, record: str, position: int) -> Change:
        change = Change()
        change.execute(
            "INSERT INTO layer_state (layer, position, record) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
            "SET position = excluded.position, record = excluded.record WHERE excluded.position >= position",
            *(self._number, position, record),
        )
        change.execute("DELETE FROM layer_event WHERE layer = ? AND position <= ?", self._number, position)
        return change


def restore_state(
    state: LayerState,
    rows: Callable[..., list[tuple[Any, ...]]],
    number: int,
    variables: Mapping[str, NDArray[Any]],
    pending: Mapping[str, Moments],
) -> int:
    """Restores the state from before a restart into an empty one, without the data for backwards.

    Args:
        state: The state.
        rows: Returns the rows of a query.
        number: The number of the layer.
        variables: The values of its variables, by name; none if they were not created.
        pending: The data of its pending updates, by forward.

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
    # The events carry no values.
    state.variables = variables_of(variables) if variables else None
    state.forwards.lose_saved(pending)
    return position


def state_record(state: LayerState) -> Record:
    """Returns a state in types that JSON has; the reverse of `fill_state`."""
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


def event_record(event: Event) -> Record:
    """Returns an event without the values of its tensors; the reverse of `event_of`."""
    return write_event(event, lambda _: _NOTHING).record


def event_of(record: Record) -> Event:
    """Returns the event of a record.

    Raises:
        ValueError, TypeError, KeyError, IndexError: It is no such record.
    """
    return read_event(WrittenEvent(record, (_NOTHING,) * _MOST_TENSORS))


def _outcome_row(outcome: ForwardOutcome) -> list[Any]:
    return [outcome.was_counted, outcome.is_spent, outcome.draw]


def _is_noticed(event: Event) -> bool:
    """Returns True if a call must not return before an event is on disk."""
    match event:
        case VariablesCreated() | VariablesSet() | AdjustmentDrawn() | UpdatesRun():
            return True
        case ForwardEnded():
            return event.pending is not None or event.averages is not None
        case ForwardsReleased():
            return event.with_updates
    return False


def _values_of(event: Event) -> Mapping[str, Array]:
    """Returns the variables that an event changes, with their new values."""
    match event:
        case VariablesCreated(variables):
            return variables.by_name()
        case VariablesSet(values):
            return values
        case ForwardEnded(averages=averages) | UpdatesRun(averages=averages) if averages is not None:
            return averages.by_name()
    return {}


def _moments_of(event: Event) -> list[Array]:
    if isinstance(event, ForwardEnded) and event.pending is not None:
        return [event.pending.mean, event.pending.variance]
    return []


def _dropped_by(event: Event) -> Sequence[str]:
    """Returns the forwards whose updates are no longer pending after an event."""
    match event:
        case UpdatesRun(forward_id):
            return [forward_id]
        case ForwardsExpired(forward_ids):
            return forward_ids
        case ForwardsReleased(forward_ids, True):
            return forward_ids
    return []


async def _to_the_end(commit: Coroutine[Any, Any, None]) -> None:
    """Waits for a commit even if the waiting call is cancelled: whatever is on disk must take effect.

    The cancellation ends the call where it waits next.
    """
    writing = asyncio.ensure_future(commit)
    cancelled = 0
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            cancelled += 1
    call = asyncio.current_task()
    assert call is not None
    for _ in range(cancelled):
        call.uncancel()
        call.cancel()
    writing.result()
