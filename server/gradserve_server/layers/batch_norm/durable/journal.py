"""The journal of a layer in a state directory."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.durable.state_records import event_record, state_record
from gradserve_server.layers.batch_norm.events import (
    AdjustmentDrawn,
    Event,
    ForwardEnded,
    ForwardsExpired,
    ForwardsReleased,
    UpdatesRun,
    VariablesCreated,
    VariablesSet,
)
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.state.files.store import Change, Space, StateStore

ToHost: TypeAlias = Callable[[Sequence[Array]], Awaitable[list[NDArray[Any]]]]
"""Returns arrays in host memory, wherever they are now."""

_MOST_EVENTS = 10_000
"""Events after which the state is written, so that they can be deleted."""


class FileLayerJournal:
    """Writes the changes of a layer.

    What others can notice of a change is on disk before it takes effect: values of variables, pending updates, and the
    ids that have been counted. That a forward is kept, used or expired is written soon: it is lost with the server
    anyway.
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
        """Takes what is there already.

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
        """All that may be there."""
        self._state: LayerState | None = None
        self._held: list[tuple[Change, Space]] = []
        """Changes of a layer that has not begun."""
        self._ended = False

    def begin(self, lifetime: Lifetime, state: LayerState) -> None:
        """See `LayerJournal`."""
        self._state = state
        change = Change()
        self._insert(change, lifetime)
        self._store.add(change)
        for held, _ in self._held:
            self._store.add(held)
        self._held = []

    def begin_again(self, state: LayerState) -> None:
        """Notes that the layer was made again, in a state that the events so far may not lead to: it lost forwards."""
        self._state = state
        if self._position:
            self._store.add(self._state_change(json.dumps(state_record(state)), self._position))

    async def append(self, event: Event) -> None:
        """See `LayerJournal`."""
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
        """See `LayerJournal`."""
        self._ended = True
        change = Change()
        if self._state is not None:
            change.execute("DELETE FROM layer WHERE id = ?", self._number)
            change.remove(self._blobs)
        for held, space in self._held:
            # Nothing is written there, so that all the space is given back.
            blob = held.arrays[0].number
            change.put(blob, [], space)
            change.remove([blob])
        self._held = []
        self._store.add(change)

    async def _hold(self, change: Change) -> None:
        """Keeps a change until the layer begins; makes sure that there will be space for it."""
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
        # Before it is written: the layer may be deleted meanwhile.
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
    """Returns the forwards whose updates are not pending after an event."""
    match event:
        case UpdatesRun(forward_id):
            return [forward_id]
        case ForwardsExpired(forward_ids):
            return forward_ids
        case ForwardsReleased(forward_ids, True):
            return forward_ids
    return []


async def _to_the_end(commit: Coroutine[Any, Any, None]) -> None:
    """Waits for a commit even if the call that waits is cancelled meanwhile: what is on disk takes effect.

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
