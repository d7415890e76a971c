"""The changes of a layer; each is decided, journaled and applied before the next one."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.averages import MovingAverages
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
from gradserve_server.layers.batch_norm.forwards import Forward
from gradserve_server.layers.batch_norm.saved import Moments, Saved
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.layers.batch_norm.variables import Variables
from gradserve_server.state.journal import Journal

EventT = TypeVar("EventT", bound=Event)
AnswerT = TypeVar("AnswerT")


class LayerChanges:
    """Decides the events that change a layer, by its state, which nothing else changes until they are applied.

    If the journal refuses an event, the caller gets the exception, and nothing has changed.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, state: LayerState, journal: Journal[Event]) -> None:
        """Takes the state to change, and the journal, which takes events before they take effect."""
        self._state = state
        self._forwards = state.forwards
        self._journal = journal
        self._deciding = asyncio.Lock()
        """Held from the decision of an event until it has been applied."""
        self._closed = False

    async def create_variables(self, variables: Variables) -> None:
        """Creates the variables with their initial values."""
        async with self._deciding:
            await self._commit(VariablesCreated(variables), self._state.create_variables)

    async def set_variables(self, values: Mapping[str, Array]) -> None:
        """Sets variables that the layer has, by TensorFlow's names."""
        async with self._deciding:
            await self._commit(VariablesSet(dict(values)), self._state.set_variables)

    async def draw(self, forward_id: str) -> int:
        """Returns the number of the random adjustment of a forward; always the same one for a forward."""
        async with self._deciding:
            drawn = self._forwards.fate(forward_id).draw
            if drawn is not None:
                return drawn
            return await self._commit(AdjustmentDrawn(forward_id, self._state.num_draws), self._state.draw)

    async def end_forward(
        self,
        forward_id: str,
        *,
        lease: float,
        saved: Saved | None,
        pending: Moments | None,
        averages: MovingAverages | None,
        released: Sequence[str],
    ) -> bool:
        """Keeps what a forward left; returns whether its update is pending.

        Args:
            forward_id: The id of the forward.
            lease: Seconds without use until what it left is forgotten.
            saved: What its backward needs, if one may come.
            pending: What its update needs, if it is run later; ignored if the forward was counted already.
            averages: The moving averages after its update in place; None if they did not move.
            released: Earlier forwards whose backwards will not come.
        """
        async with self._deciding:
            event = ForwardEnded(
                forward_id=forward_id,
                lease=lease,
                saved=saved,
                pending=None if self._forwards.fate(forward_id).was_counted else pending,
                averages=averages,
                released=tuple(released),
            )
            return await self._commit(event, self._state.end_forward)

    async def run_updates(self, forward_id: str, averages: MovingAverages) -> bool:
        """Sets the moving averages to those after a forward; returns False if its update has just been dropped."""
        async with self._deciding:
            kept = self._forwards.find(forward_id)
            if kept is None or kept.pending is None:
                return False
            await self._commit(UpdatesRun(forward_id, averages), self._state.run_updates)
            return True

    async def end_backward(self, forward: Forward, saved: Saved | None) -> None:
        """Releases what the last backward of a forward was computed with."""
        async with self._deciding:
            # A repeated forward may have saved again meanwhile, for another backward.
            if forward.saved is saved:
                await self._commit(BackwardEnded(forward.forward_id), self._state.end_backward)

    async def release(self, forward_ids: Sequence[str], *, with_updates: bool) -> int:
        """Releases what forwards keep for their backwards, and maybe their updates; returns how many were kept."""
        async with self._deciding:
            if not any(self._forwards.find(forward_id) for forward_id in forward_ids):
                return 0
            return await self._commit(ForwardsReleased(tuple(forward_ids), with_updates), self._state.release)

    async def expire(self) -> int:
        """Forgets unused forwards whose lease has expired; returns how many."""
        async with self._deciding:
            expired = self._forwards.expired()
            return await self._commit(ForwardsExpired(expired), self._state.expire) if expired else 0

    def close(self) -> None:
        """Stops journaling, as the layer was deleted."""
        self._closed = True

    async def _commit(self, event: EventT, apply: Callable[[EventT], AnswerT]) -> AnswerT:
        """Applies an event once the journal has it. Called with `_deciding` held since before the decision."""
        if not self._closed:
            await self._journal.append(event)
        return apply(event)
