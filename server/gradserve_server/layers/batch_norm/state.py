"""The state of a layer, and the changes that are made to it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gradserve_server.devices.device import Array
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
from gradserve_server.layers.batch_norm.forwards import Forward, Forwards
from gradserve_server.layers.batch_norm.variables import MovingAverages, Variables


class LayerState:
    """The state of a layer, which only events change.

    The same events in the same order, applied to another layer with an equal configuration, give the same state.
    Leases begin when an event is applied.

    Attributes:
        variables: The variables; None until they are created.
        num_updates: The number of updates of the moving averages.
        num_draws: The number of random adjustments drawn.
        forwards: The forwards that wait for a backward or an update.
    """

    def __init__(self, forwards: Forwards) -> None:
        self.variables: Variables | None = None
        self.num_updates = 0
        self.num_draws = 0
        self.forwards = forwards

    def create_variables(self, event: VariablesCreated) -> None:
        """Applies the creation of the variables."""
        self.variables = event.variables

    def set_variables(self, event: VariablesSet) -> None:
        """Applies the setting of variables."""
        assert self.variables is not None
        self.variables = self.variables.with_values(event.values)

    def draw(self, event: AdjustmentDrawn) -> int:
        """Applies the draw of an adjustment; returns its number."""
        self.num_draws = event.number + 1
        self.forwards.draw(event.forward_id, event.number)
        return event.number

    def end_forward(self, event: ForwardEnded) -> bool:
        """Applies the results of a forward; returns whether its update is pending."""
        if event.averages is not None:
            self._follow(event.averages)
        self.forwards.add(event)
        kept = self.forwards.find(event.forward_id)
        has_pending = kept is not None and kept.pending is not None
        self.forwards.release(event.released, with_updates=False)
        return has_pending

    def run_updates(self, event: UpdatesRun) -> None:
        """Applies the update of the moving averages after a forward."""
        self._follow(event.averages)
        self.forwards.settle(event.forward_id)

    def end_backward(self, event: BackwardEnded) -> None:
        """Applies the end of the last backward of a forward."""
        self.forwards.spend(event.forward_id)

    def release(self, event: ForwardsReleased) -> int:
        """Applies the release of forwards; returns how many of them were kept."""
        return self.forwards.release(event.forward_ids, with_updates=event.with_updates)

    def expire(self, event: ForwardsExpired) -> int:
        """Applies the end of leases; returns how many forwards were forgotten."""
        return self.forwards.forget(event.forward_ids)

    def relocate_variables(self, copies: Mapping[str, Array]) -> None:
        """Replaces variables by copies in another memory, by name. The values are the same, so there is no event."""
        assert self.variables is not None
        self.variables = self.variables.with_values(copies)

    def replay(self, event: Event) -> None:
        """Applies an event of any kind and drops its result."""
        match event:
            case VariablesCreated():
                self.create_variables(event)
            case VariablesSet():
                self.set_variables(event)
            case AdjustmentDrawn():
                self.draw(event)
            case ForwardEnded():
                self.end_forward(event)
            case UpdatesRun():
                self.run_updates(event)
            case BackwardEnded():
                self.end_backward(event)
            case ForwardsReleased():
                self.release(event)
            case ForwardsExpired():
                self.expire(event)

    def _follow(self, averages: MovingAverages) -> None:
        assert self.variables is not None
        self.variables = replace(self.variables, averages=averages)
        self.num_updates += 1


EventT = TypeVar("EventT", bound=Event)
AnswerT = TypeVar("AnswerT")


class LayerChanges:
    """Decides the events that change a layer; each is journaled and applied before the next one is decided.

    If the journal refuses an event, the caller gets the exception, and nothing has changed.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, state: LayerState, record: Callable[[Event], Awaitable[None]] | None) -> None:
        """`record` gets each event before it takes effect; None if the layer is not durable."""
        self._state = state
        self._forwards = state.forwards
        self._record = record
        self._deciding = asyncio.Lock()
        """Held from the decision of an event until it has been applied."""

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
            drawn = self._forwards.outcome(forward_id).draw
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
        """Keeps the data of a forward; returns whether its update is pending.

        Args:
            forward_id: The id of the forward.
            lease: Seconds without use after which the kept data is dropped.
            saved: The data for its backward, if one may follow.
            pending: The data for its update, if it is run later; ignored if the forward was counted already.
            averages: The moving averages after its update in place; None if they did not move.
            released: Earlier forwards that need no backward any more.
        """
        async with self._deciding:
            event = ForwardEnded(
                forward_id=forward_id,
                lease=lease,
                saved=saved,
                pending=None if self._forwards.outcome(forward_id).was_counted else pending,
                averages=averages,
                released=tuple(released),
            )
            return await self._commit(event, self._state.end_forward)

    async def run_updates(self, forward_id: str, averages: MovingAverages) -> bool:
        """Sets the moving averages to those after a forward; returns False if its update was dropped."""
        async with self._deciding:
            kept = self._forwards.find(forward_id)
            if kept is None or kept.pending is None:
                return False
            await self._commit(UpdatesRun(forward_id, averages), self._state.run_updates)
            return True

    async def end_backward(self, forward: Forward, saved: Saved | None) -> None:
        """Releases what the last backward of a forward was computed with."""
        async with self._deciding:
            # A repeated forward may have saved data for another backward in the meantime.
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
        self._record = None

    async def _commit(self, event: EventT, apply: Callable[[EventT], AnswerT]) -> AnswerT:
        """Applies an event once the journal has it. Called with `_deciding` held since before the decision."""
        if self._record is not None:
            await self._record(event)
        return apply(event)
