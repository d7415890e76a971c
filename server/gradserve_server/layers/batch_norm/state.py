"""The variables of a layer, and what is left and remembered of its forwards."""

from collections.abc import Mapping
from dataclasses import replace

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
from gradserve_server.layers.batch_norm.forwards import Forwards
from gradserve_server.layers.batch_norm.variables import Variables


class LayerState:
    """What events have made of a layer.

    It is made of events alone: the same events in the same order, applied to the state of another layer with an equal
    configuration, give the same one. Leases begin when an event is applied.

    Attributes:
        variables: None until they are created.
        num_updates: Times that the moving averages moved.
        num_draws: Random adjustments that were drawn.
        forwards: Those that something is left to do for.
    """

    def __init__(self, forwards: Forwards) -> None:
        """Takes what is to keep forwards."""
        self.variables: Variables | None = None
        self.num_updates = 0
        self.num_draws = 0
        self.forwards = forwards

    def create_variables(self, event: VariablesCreated) -> None:
        """Applies the creation of the variables."""
        self.variables = event.variables

    def set_variables(self, event: VariablesSet) -> None:
        """Applies that variables were set."""
        assert self.variables is not None
        self.variables = self.variables.with_values(event.values)

    def draw(self, event: AdjustmentDrawn) -> int:
        """Applies that an adjustment was drawn; returns the number of the draw."""
        self.num_draws = event.number + 1
        self.forwards.draw(event.forward_id, event.number)
        return event.number

    def end_forward(self, event: ForwardEnded) -> bool:
        """Applies what a forward did; returns whether its update waits."""
        if event.averages is not None:
            self._follow(event.averages)
        self.forwards.add(event)
        kept = self.forwards.find(event.forward_id)
        has_pending = kept is not None and kept.pending is not None
        self.forwards.release(event.released, with_updates=False)
        return has_pending

    def run_updates(self, event: UpdatesRun) -> None:
        """Applies that the moving averages have followed a forward."""
        self._follow(event.averages)
        self.forwards.settle(event.forward_id)

    def end_backward(self, event: BackwardEnded) -> None:
        """Applies that the last backward of a forward was computed."""
        self.forwards.spend(event.forward_id)

    def release(self, event: ForwardsReleased) -> int:
        """Applies that forwards were released; returns how many of them there were."""
        return self.forwards.release(event.forward_ids, with_updates=event.with_updates)

    def expire(self, event: ForwardsExpired) -> int:
        """Applies that leases have ended; returns how many forwards were forgotten."""
        return self.forwards.forget(event.forward_ids)

    def relocate_variables(self, copies: Mapping[str, Array]) -> None:
        """Makes copies in another memory take the place of variables, by name. The values are the same: no event."""
        assert self.variables is not None
        self.variables = self.variables.with_values(copies)

    def replay(self, event: Event) -> None:
        """Applies an event of which nobody waits for the answer."""
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
