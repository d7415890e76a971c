"""The expected variables of parameters, computed from the members of each round, in the order of its record.

The equations of optimizers and of reductions are those of the server, which other tests compare with frameworks. Which
updates come in, in which order, with which weight, divisor, state and counts, is computed here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradserve_server.accumulators.gradient import Array
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.optimizers.stepping import ComponentStep, Stepper
from gradserve_server.parameters.reductions.reduce import UpdateReport, reduce_updates
from gradserve_server.parameters.reductions.spec import Sum
from gradserve_server.parameters.spec import Normalization, ParametersSpec, UpdateKind
from gradserve_server.parameters.variables import MASTER, OptimizerState
from tests.simulation.parameters.updates import values_of

_STEPPER = Stepper(ForkJoin(1))


@dataclass(frozen=True)
class Member:
    """An update in a round.

    Attributes:
        number: Its number.
        weight: The weight that counts.
        worker_id: Its worker.
    """

    number: int
    weight: float
    worker_id: str


@dataclass(frozen=True)
class Model:
    """Parameters after a round: masters, and the state of the optimizer that made them. Never changes.

    Attributes:
        spec: The properties.
        optimizer: The optimizer that made them.
        masters: The masters by component.
        slots: The slots by component.
        component_steps: The rounds of each component.
        rounds: The rounds that the schedule has seen.
        reports: What the reduction found about the updates.
    """

    spec: ParametersSpec
    optimizer: Optimizer
    masters: Mapping[str, Array]
    slots: Mapping[str, tuple[Array, ...]]
    component_steps: Mapping[str, int]
    rounds: int = 0
    reports: tuple[UpdateReport, ...] = ()

    @classmethod
    def loaded(
        cls, spec: ParametersSpec, optimizer: Optimizer, values: Mapping[str, Array], state: OptimizerState | None
    ) -> "Model":
        """Returns parameters that were loaded, with a state or a new one."""
        masters = {name: values[name].astype(dtype) for name, dtype in spec.masters.items()}
        if state is None:
            return cls(spec, optimizer, masters, _new_slots(spec, optimizer), dict.fromkeys(spec.by_name, 0))
        masters |= {name: array.copy() for name, array in state.slots.get(MASTER, {}).items()}
        slots = {
            name: tuple([state.slots[slot.name][name].copy() for slot in optimizer.slots]) for name in spec.by_name
        }
        return cls(spec, optimizer, masters, slots, dict(state.component_steps), state.rounds)

    @property
    def values(self) -> dict[str, Array]:
        """The version as it is read."""
        return {each.name: self.masters[each.name].astype(each.dtype) for each in self.spec.components}

    def of_optimizer(self, optimizer: Optimizer) -> "Model":
        """Returns the parameters with another optimizer, which goes on with the state if it can."""
        if optimizer.keeps_state_of(self.optimizer):
            return replace(self, optimizer=optimizer)
        steps = dict.fromkeys(self.spec.by_name, 0)
        return replace(self, optimizer=optimizer, slots=_new_slots(self.spec, optimizer), component_steps=steps)

    def after(self, members: Sequence[Member], optimizer: Optimizer, schedule: Schedule) -> "Model":
        """Returns the parameters after a round.

        Args:
            members: Its updates, in the order of its record.
            optimizer: Its optimizer.
            schedule: Its schedule.
        """
        begun = self.of_optimizer(optimizer)
        spec = self.spec
        updates, reports = (_held if spec.holds_updates else _running)(spec, members)
        slots = {name: tuple([each.copy() for each in arrays]) for name, arrays in begun.slots.items()}
        masters, component_steps = dict(self.masters), dict(begun.component_steps)
        steps = []
        for name, (summed, divisor) in updates.items():
            component_steps[name] += 1
            masters[name] = np.empty_like(self.masters[name])
            steps.append(
                ComponentStep(
                    total=summed,
                    addend=None,
                    factor=1.0,
                    divisor=divisor,
                    negate=spec.update is UpdateKind.DELTA,
                    parameter=self.masters[name],
                    slots=slots[name],
                    result=masters[name],
                    step=component_steps[name],
                )
            )
        _STEPPER.step(optimizer, schedule.factor(self.rounds), steps)
        return Model(spec, optimizer, masters, slots, component_steps, self.rounds + 1, reports)

    def differences(self, state: OptimizerState) -> list[str]:
        """Returns the parts of a server's state that differ from this one."""
        found = []
        if state.optimizer != self.optimizer:
            found.append(f"the optimizer is {state.optimizer}, not {self.optimizer}")
        if dict(state.component_steps) != dict(self.component_steps):
            found.append(f"the counts are {state.component_steps}, not {self.component_steps}")
        if state.rounds != self.rounds:
            found.append(f"{state.rounds} rounds are counted, not {self.rounds}")
        for place, slot in enumerate(self.optimizer.slots):
            there = state.slots.get(slot.name, {})
            differ = [name for name, arrays in self.slots.items() if not _same(there.get(name), arrays[place])]
            found += [f"{slot.name} of {name} has other bits" for name in differ]
        for name, array in state.slots.get(MASTER, {}).items():
            if not _same(array, self.masters[name]):
                found.append(f"the master of {name} has other bits")
        return found


def _same(one: Array | None, other: Array) -> bool:
    return one is not None and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _new_slots(spec: ParametersSpec, optimizer: Optimizer) -> dict[str, tuple[Array, ...]]:
    return {
        name: tuple([np.full(spec.shapes[name], slot.initial_value, dtype) for slot in optimizer.slots])
        for name, dtype in spec.masters.items()
    }


def _running(
    spec: ParametersSpec, members: Sequence[Member]
) -> tuple[dict[str, tuple[Array, float]], tuple[UpdateReport, ...]]:
    """Returns the sum and the divisor of each component, and the reports."""
    reports = []
    sums: dict[str, Array] = {}
    weights: dict[str, list[float]] = {}
    for member in members:
        values = values_of(member.number, spec)
        factor = member.weight
        if spec.clip_norm is not None:
            norm = norm_of(values)
            scale = min(1.0, spec.clip_norm / norm) if norm else 1.0
            reports.append(UpdateReport(norm, scale, None, is_dropped=False, factor=factor))
            factor *= scale
        for name, value in values.items():
            dtype = spec.masters[name]
            scaled: Any = value.astype(dtype) * dtype.type(factor)
            sums[name] = scaled if name not in sums else sums[name] + scaled
            weights.setdefault(name, []).append(member.weight)
    return {name: (summed, _divisor(spec, weights[name])) for name, summed in sums.items()}, tuple(reports)


def norm_of(values: Mapping[str, Array]) -> float:
    """Returns the norm of an update, whose square is rounded once."""
    return math.sqrt(math.fsum([each * each for value in values.values() for each in value.astype(float).flat]))


def _divisor(spec: ParametersSpec, weights: Sequence[float]) -> float:
    if isinstance(spec.reduction, Sum):
        return 1.0
    if spec.normalization is Normalization.COUNT:
        return float(len(weights))
    divisor = 0.0
    for weight in weights:
        divisor += weight
    return divisor


def _held(
    spec: ParametersSpec, members: Sequence[Member]
) -> tuple[dict[str, tuple[Array, float]], tuple[UpdateReport, ...]]:
    """Returns the reduced components with the divisor 1, and the reports in the order of the record."""
    places = list(range(len(members)))
    if spec.deterministic:
        places.sort(key=lambda place: (members[place].worker_id, members[place].number))
    reduced, report = reduce_updates(
        spec.reduction,
        tuple(spec.by_name),
        [values_of(members[place].number, spec) for place in places],
        [members[place].weight for place in places],
        by_count=spec.normalization is Normalization.COUNT,
        clip_norm=spec.clip_norm,
    )
    by_place = dict(zip(places, report.updates, strict=True))
    return {name: (value, 1.0) for name, value in reduced.items()}, tuple([by_place[each] for each in sorted(by_place)])
