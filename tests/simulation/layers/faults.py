"""Faults of layers that a simulated world must find.

They replace private steps of the server, as no call of its clients can plant such a fault.
"""

from dataclasses import replace
from typing import Any

import pytest

from gradserve_server.layers.batch_norm import journal as journal_module
from gradserve_server.layers.batch_norm import layer as layer_module
from gradserve_server.layers.batch_norm import restoring as restoring_module
from gradserve_server.layers.batch_norm.events import AdjustmentDrawn, ForwardEnded, VariablesSet
from gradserve_server.layers.batch_norm.forwards import Expiries, ForwardOutcome, Forwards
from gradserve_server.layers.batch_norm.journal import LayerJournal
from gradserve_server.layers.batch_norm.records import LAYERS
from gradserve_server.layers.batch_norm.state import LayerChanges
from tests.simulation.accumulators.faults import window_off_by_one
from tests.simulation.planting import Fault, without


def forget_which_forwards_have_counted(patch: pytest.MonkeyPatch) -> None:
    def record(state: Any) -> Any:
        return {**LAYERS.state_record(state), "fates": []}

    patch.setattr(journal_module, "LAYERS", replace(LAYERS, state_record=record))
    patch.setattr(restoring_module, "state_record", record)


def count_again_after_the_lease(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Any, forward_ids: Any) -> int:
        count: int = real(self, forward_ids)
        for forward_id in forward_ids:
            self._set_outcome(forward_id, ForwardOutcome())
        return count

    real: Any = Forwards.forget
    patch.setattr(Forwards, "forget", forget)


def show_changes_before_they_are_on_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal_module, "_is_noticed", lambda event: False)


def set_variables_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    real: Any = vars(journal_module)["_values_of"]
    patch.setattr(journal_module, "_values_of", lambda event: {} if isinstance(event, VariablesSet) else real(event))


def set_one_variable_of_several(patch: pytest.MonkeyPatch) -> None:
    async def set_variables(self: Any, values: Any) -> None:
        await real(self, dict(list(values.items())[:1]))

    real: Any = LayerChanges.set_variables
    patch.setattr(LayerChanges, "set_variables", set_variables)


def run_an_update_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forwards, "settle", lambda self, forward_id: None)


def keep_updates_that_were_run_on_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal_module, "_dropped_by", lambda event: [])


class _NoLock:
    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exception: object) -> None:
        pass


def update_averages_side_by_side(patch: pytest.MonkeyPatch) -> None:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self._changing = _NoLock()

    real: Any = layer_module.BatchNormLayer.__init__
    patch.setattr(layer_module.BatchNormLayer, "__init__", init)


def draw_another_adjustment(patch: pytest.MonkeyPatch) -> None:
    async def draw(self: Any, forward_id: str) -> int:
        async with self._deciding:
            number: int = await self._commit(AdjustmentDrawn(forward_id, self._state.num_draws), self._state.draw)
            return number

    patch.setattr(LayerChanges, "draw", draw)


def keep_forwards_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Expiries, "expired", lambda self, now: [])


def repeat_without_renewing_the_lease(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, event: ForwardEnded) -> None:
        kept = self.find(event.forward_id)
        expires = None if kept is None else kept.expires
        real(self, event)
        if expires is not None and event.saved is None and event.pending is None:
            kept.expires = expires

    real: Any = Forwards.add
    patch.setattr(Forwards, "add", add)


def delete_layers_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerJournal, "close", lambda self: setattr(self, "has_ended", True))


FAULTS: dict[str, Fault] = {
    "forget which forwards have counted": forget_which_forwards_have_counted,
    "remember one forward too few": window_off_by_one,
    "count a forward again after its lease": count_again_after_the_lease,
    "show changes of a layer before they are on disk": show_changes_before_they_are_on_disk,
    "set variables in memory only": set_variables_in_memory_only,
    "set one variable of several": set_one_variable_of_several,
    "run an update again": run_an_update_again,
    "updates that were run stay on disk": keep_updates_that_were_run_on_disk,
    "update moving averages side by side": update_averages_side_by_side,
    "draw another adjustment for a repeated forward": draw_another_adjustment,
    "events of a layer stay when its state is written": without("INSERT INTO layer_state"),
    "keep forwards for ever": keep_forwards_for_ever,
    "repeat a forward without renewing its lease": repeat_without_renewing_the_lease,
    "delete layers in memory only": delete_layers_in_memory_only,
}
