"""The state of a layer: its variables, and what it keeps and remembers of forwards."""

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
    """The state of a layer, which only events change.

    The same events in the same order, applied to another layer with an equal configuration, give the same state.
    Leases begin when an event is applied.

    Attributes:
        variables: The variables; None until they are created.
        num_updates: The number of updates of the moving averages.
        num_draws: The number of random adjustments drawn.
        forwards: The forwards that have a backward or an update to come.
    """

    def __init__(self, forwards: Forwards) -> None:
        """Takes the object that keeps forwards."""
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
