"""The journals of durable layers in a state directory."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import BatchNormConfig
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
from gradserve_server.layers.batch_norm.records import LAYERS, config_record
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability, Journal, Journals
from gradserve_server.storage.store import Change, Space, StateStore

ToHost: TypeAlias = Callable[[Sequence[Array]], Awaitable[list[NDArray[Any]]]]
"""Returns arrays of any memory in host memory."""


class LayerJournal(Journal[Event]):
    """Writes the changes of a layer to a state directory.

    Whatever clients can observe of a change is on disk before it takes effect: values of variables, pending updates and
    the ids of counted forwards. Whether a forward is kept, used or expired is written later, as a restart drops the
    data of forwards anyway.
    """

    def __init__(
        self,
        journals: "LayerJournals",
        number: int,
        row: Callable[[Lifetime], Change] | None,
        *,
        position: int = 0,
        variables: Mapping[str, int] | None = None,
        pending: Mapping[str, int] | None = None,
    ) -> None:
        """Creates the journal of a new layer, or of one that is in the directory already.

        Args:
            journals: Those of the server.
            number: The number of the layer in the state directory.
            row: Returns the change that adds the layer itself; None if it is there.
            position: The position of its latest event.
            variables: The blobs of its variables, by name.
            pending: The blobs of its pending updates, by forward.
        """
        super().__init__(journals, number, position)
        self._to_host = journals.to_host
        self._row = row
        """None once the layer is visible."""
        self._variables = dict(variables or {})
        self._pending = dict(pending or {})
        self._blobs = {*self._variables.values(), *self._pending.values()}
        """All blobs that may exist."""
        self._held: list[tuple[Change, Space]] = []
        """Changes of a layer that is not visible yet."""

    def begin(self, lifetime: Lifetime) -> None:
        """Writes the layer, which can be found by its name from now on, and the changes that were held back."""
        if self._row is not None:
            self.store.add(self._row(lifetime))
            self._row = None
        for held, _ in self._held:
            self.store.add(held)
        self._held = []

    async def append(self, event: Event) -> None:
        """Returns once an event is written or, if clients cannot notice it, is going to be.

        If it raises, the event does not take effect: nothing has changed, and the event is not replayed.
        """
        values, moments = _values_of(event), _moments_of(event)
        arrays = await self._to_host([*values.values(), *moments])
        if self.has_ended:
            return
        self.shorten()
        change = Change()
        if not isinstance(event, VariablesCreated | VariablesSet):
            self.write(change, event)
        variables = self._put_variables(change, dict(zip(values, arrays, strict=False))) if values else self._variables
        added = self._put_pending(change, event, arrays[len(values) :])
        dropped = self._drop_pending(change, event)
        if self._row is not None:
            await self._hold(change)
        elif _is_noticed(event):
            await _to_the_end(self.store.commit(change))
        else:
            self.store.add(change)
        self._variables = variables
        self._pending |= added
        for forward_id in dropped:
            del self._pending[forward_id]
        self._blobs.difference_update(change.removed)

    def end(self) -> Change:
        """Ends the journal; returns the change that removes the layer. Gives back the space of held changes."""
        change = super().end()
        if self._row is None:
            change.remove(self._blobs)
        for _, space in self._held:
            self.store.give_back(space)
        self._held = []
        return change

    def close(self) -> None:
        """Removes the layer from the directory, as it was deleted, or was not needed."""
        self.store.add(self.end())

    async def _hold(self, change: Change) -> None:
        """Holds a change back until the layer begins, and reserves the space for it."""
        for each in change.arrays:
            each.space = await self.store.reserve(sum(array.nbytes for array in each.arrays))
            if self.has_ended:
                self.store.give_back(each.space)
                return
            self._held.append((change, each.space))

    def _put_variables(self, change: Change, values: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        blob = self._new_blob(change, list(values.values()))
        for index, name in enumerate(values):
            change.execute(
                "INSERT OR REPLACE INTO layer_variable (layer, name, place, blob) VALUES (?, ?, ?, ?)",
                *(self.number, name, index, blob),
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
            *(self.number, event.forward_id, event.pending.implementation.name, blob),
        )
        return {event.forward_id: blob}

    def _drop_pending(self, change: Change, event: Event) -> list[str]:
        dropped = [each for each in dict.fromkeys(_dropped_by(event)) if each in self._pending]
        for forward_id in dropped:
            change.execute("DELETE FROM layer_update WHERE layer = ? AND forward = ?", self.number, forward_id)
            change.remove([self._pending[forward_id]])
        return dropped

    def _new_blob(self, change: Change, arrays: Sequence[NDArray[Any]]) -> int:
        blob = self.store.new_blob()
        change.put(blob, arrays)
        # Before it is written, as the layer may be deleted in the meantime.
        self._blobs.add(blob)
        return blob


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


class LayerJournals(Journals[Event, LayerState]):
    """The journals of a server's durable layers.

    Attributes:
        to_host: Copies values to host memory.
    """

    def __init__(self, store: StateStore, default: Durability) -> None:
        super().__init__(store, LAYERS, default)
        self.to_host: ToHost = _as_it_is

    def journal(
        self, key: ResourceKey, config: BatchNormConfig, incarnation: str, creation_id: str
    ) -> LayerJournal | None:
        """Returns the journal of a new layer, whose configuration has its durability; None for NONE."""
        durability = config.durability
        assert durability is not None, "the kind has chosen one"
        if durability is Durability.NONE:
            return None
        number = self.new_number()

        def row(lifetime: Lifetime) -> Change:
            change = Change()
            change.execute(
                "INSERT INTO layer "
                "(id, container, name, owner, incarnation, creation_id, durability, config, lifetime) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(number, key.container, key.name, key.user.name),
                *(incarnation, creation_id, durability.value),
                *(json.dumps(config_record(config)), json.dumps(asdict(lifetime))),
            )
            return change

        return LayerJournal(self, number, row)


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


async def _as_it_is(arrays: Sequence[Array]) -> list[NDArray[Any]]:
    return list(arrays)
