"""The changes of a layer, each decided, journaled and applied before the next one."""

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
    """Decides what events change a layer: by its state at that moment, which nothing else changes until they have.

    What the journal refuses, whoever asked for it gets as an exception: nothing has changed then.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, state: LayerState, journal: Journal[Event]) -> None:
        """Takes the state to change, and what takes events before they have an effect."""
        self._state = state
        self._forwards = state.forwards
        self._journal = journal
        self._deciding = asyncio.Lock()
        """Held from the moment that an event is decided until it has been applied."""
        self._closed = False

    async def create_variables(self, variables: Variables) -> None:
        """Gives the variables their first values."""
        async with self._deciding:
            await self._commit(VariablesCreated(variables), self._state.create_variables)

    async def set_variables(self, values: Mapping[str, Array]) -> None:
        """Sets variables, by TensorFlow's names, which the layer has."""
        async with self._deciding:
            await self._commit(VariablesSet(dict(values)), self._state.set_variables)

    async def draw(self, forward_id: str) -> int:
        """Returns the number of the random adjustment of a forward: the same one whenever it is asked for."""
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
        """Keeps what a forward left; returns whether its update waits to be run.

        Args:
            forward_id: Of the forward.
            lease: Seconds without use until what it left is forgotten.
            saved: For its backward, if that may come.
            pending: For its update, if that is to wait; not if the forward was counted already.
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
        """Makes the moving averages those after a forward; returns False if it has just expired."""
        async with self._deciding:
            if not self._forwards.fate(forward_id).was_counted:
                return False
            await self._commit(UpdatesRun(forward_id, averages), self._state.run_updates)
            return True

    async def end_backward(self, forward: Forward, saved: Saved | None) -> None:
        """Lets go of what the last backward of a forward was computed with."""
        async with self._deciding:
            # A repeated forward may have saved anew meanwhile: that is for another backward.
            if forward.saved is saved:
                await self._commit(BackwardEnded(forward.forward_id), self._state.end_backward)

    async def release(self, forward_ids: Sequence[str], *, with_updates: bool) -> int:
        """Lets go of what the backwards of forwards need, and of their updates; returns how many there were."""
        async with self._deciding:
            if not any(self._forwards.find(forward_id) for forward_id in forward_ids):
                return 0
            return await self._commit(ForwardsReleased(tuple(forward_ids), with_updates), self._state.release)

    async def expire(self) -> int:
        """Forgets forwards whose lease has run out and that nobody uses; returns how many."""
        async with self._deciding:
            expired = self._forwards.expired()
            return await self._commit(ForwardsExpired(expired), self._state.expire) if expired else 0

    def close(self) -> None:
        """Keeps events from the journal from now on: the layer was deleted."""
        self._closed = True

    async def _commit(self, event: EventT, apply: Callable[[EventT], AnswerT]) -> AnswerT:
        """Applies an event once the journal has it. Called by who holds `_deciding`, and decided the event therein."""
        if not self._closed:
            await self._journal.append(event)
        return apply(event)
