"""The variables: masters, the state of the optimizer, and the digest of the newest version."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradserve_protocol.digest import digest_of
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.places.place import Place
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_LOADED_STEP, listed
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.optimizers.stepping import ComponentStep, Stepper
from gradserve_server.parameters.reductions.reduce import UpdateReport
from gradserve_server.parameters.spec import ParametersSpec, UpdateKind

MASTER = "master"
"""The name of the master of a 16-bit component among the slots."""


def check_step(step: int) -> None:
    """Checks the step of saved parameters.

    Raises:
        InvalidArgumentError: It is negative, or so great that no rounds could follow.
    """
    if not 0 <= step <= MAX_LOADED_STEP:
        raise InvalidArgumentError(f"expected a step from 0 to {MAX_LOADED_STEP}, got {step}", field="step")


@dataclass(frozen=True)
class OptimizerState:
    """The memory of an optimizer, and the masters of 16-bit components.

    Attributes:
        slots: Arrays in the dtypes of the masters, by slot and component; with `MASTER` among the slots.
        component_steps: The rounds in which each component had an update.
        rounds: The number of rounds that the schedule has seen.
        optimizer: The optimizer that they belong to.
    """

    slots: Mapping[str, Mapping[str, Array]]
    component_steps: Mapping[str, int]
    rounds: int
    optimizer: Optimizer


@dataclass(frozen=True)
class Loaded:
    """Values to begin with, or to go on with.

    Attributes:
        values: Every component, in its dtype; or in another real one that is converted, unless they are immutable.
        step: Their step.
        state: The state of the optimizer; None for a new one.
        is_immutable: Whether the values never change, so that they need not be copied.
    """

    values: Mapping[str, Array]
    step: int = 0
    state: OptimizerState | None = None
    is_immutable: bool = False


@dataclass(frozen=True, slots=True)
class ReducedUpdate:
    """The updates of one component in a round, up to the division.

    Attributes:
        total: The sum, in the dtype of the master; None if `addend` is all.
        addend: The last update, which is not in the sum yet, in the component's dtype; None if it is.
        factor: The factor of the addend.
        divisor: The divisor of the sum.
    """

    total: Array | None
    addend: Array | None
    factor: float
    divisor: float


@dataclass(frozen=True, slots=True)
class _Following:
    """An optimizer that takes the place of another one.

    Attributes:
        optimizer: The optimizer.
        slots: Its state, which is new; None if it goes on with that of the other one.
    """

    optimizer: Optimizer
    slots: dict[str, tuple[Array, ...]] | None


class Variables:
    """The masters of parameters and the state of their optimizer.

    Masters of float32 and float64 components are the arrays of the newest version; those of 16-bit components are kept
    beside it, so that rounding never accumulates. Changes come one at a time, from any thread.

    The state is always that which the newest version has left, as it is on disk. Another optimizer takes it over, or
    begins with a new one, when it makes its first version.

    Attributes:
        spec: The properties.
        stepper: Takes the steps, and runs other work on the values on all cores.
        optimizer: The optimizer of the state.
        values: The newest version, as it is read.
        digest: Its digest.
        component_steps: The rounds in which each component had an update.
        rounds: The number of rounds that the schedule has seen.
        reports: What the reduction found about the updates of the latest round, in order of arrival; empty if it looked
            at none by itself.
    """

    def __init__(self, spec: ParametersSpec, place: Place, stepper: Stepper) -> None:
        """Makes no arrays yet: `load` follows."""
        self.spec = spec
        self.stepper = stepper
        self.optimizer = spec.rules.optimizer
        self._place = place
        self.values: Mapping[str, Array] = {}
        self.digest = b""
        self.component_steps = dict.fromkeys(spec.by_name, 0)
        self.rounds = 0
        self.reports: tuple[UpdateReport, ...] = ()
        self._masters: dict[str, Array] = {}
        self._slots: dict[str, tuple[Array, ...]] = {}
        self._present: _Following | None = None
        """The optimizer of this round, if it is another one."""
        self._next: _Following | None = None
        """The optimizer of the next round, if it is another one."""

    @property
    def nbytes(self) -> int:
        """The memory of the state, of a new one that is to follow, and of masters that are in no version."""
        all_slots = [self._slots, *[each.slots for each in self._following if each.slots is not None]]
        total = sum([slot.nbytes for state in all_slots for slots in state.values() for slot in slots])
        return total + sum([self._masters[name].nbytes for name in self.narrow if name in self._masters])

    def slot_bytes(self, optimizer: Optimizer) -> int:
        """Returns the memory of the slots of an optimizer."""
        return len(optimizer.slots) * self.spec.master_bytes()

    def state_bytes(self, optimizer: Optimizer) -> int:
        """Returns the size of the state of an optimizer, with masters that are in no version."""
        return self.slot_bytes(optimizer) + self.spec.master_bytes(self.narrow)

    @property
    def state(self) -> OptimizerState:
        """The state of the optimizer after the newest version. Its arrays change with the next round."""
        return self._state(self.optimizer, self._slots, self.component_steps)

    @property
    def next_state(self) -> OptimizerState:
        """The state with which the next round begins, as far as it is known: that of its optimizer.

        Its arrays change with the next round.
        """
        slots, steps = self._slots, self.component_steps
        for each in self._following:
            if each.slots is not None:
                slots, steps = each.slots, dict.fromkeys(self.spec.by_name, 0)
        return self._state(self.next_optimizer, slots, steps)

    def new_state(self, optimizer: Optimizer) -> OptimizerState:
        """Returns a new state of an optimizer, of which only the masters of 16-bit components change with a round.

        Raises:
            MemoryError: There is not enough memory.
        """
        return self._state(optimizer, self._new_slots(optimizer, None), dict.fromkeys(self.spec.by_name, 0))

    def _state(
        self, optimizer: Optimizer, slots: Mapping[str, tuple[Array, ...]], steps: Mapping[str, int]
    ) -> OptimizerState:
        by_slot: dict[str, dict[str, Array]] = {
            slot.name: {name: arrays[place] for name, arrays in slots.items()}
            for place, slot in enumerate(optimizer.slots)
        }
        if self.narrow:
            by_slot[MASTER] = {name: self._masters[name] for name in self.narrow}
        return OptimizerState(by_slot, dict(steps), self.rounds, optimizer)

    def stage_load(self, loaded: Loaded, values: Mapping[str, Array], optimizer: Optimizer) -> Callable[[], None]:
        """Prepares to go on with other values; returns the function that does, which cannot fail.

        Args:
            loaded: The values and the state, checked by `check_loaded`.
            values: The values in memory that never changes; they become the newest version.
            optimizer: The optimizer to go on with.

        Raises:
            MemoryError: There is not enough memory.
        """
        state = loaded.state
        masters = {name: values[name] for name in self.spec.by_name if name not in self.narrow}
        for name in self.narrow:
            kept = None if state is None else state.slots.get(MASTER, {}).get(name)
            masters[name] = self._copied(values[name] if kept is None else kept, name)
        slots = self._new_slots(optimizer, None if state is None else state.slots)
        digest = digest_of(values.values(), self.stepper.run_all)

        def load() -> None:
            self.values, self.digest, self.optimizer = values, digest, optimizer
            self._present = self._next = None
            self._masters, self._slots = masters, slots
            self.component_steps = dict.fromkeys(self.spec.by_name, 0)
            self.rounds = 0
            if state is not None:
                self.component_steps |= state.component_steps
                self.rounds = state.rounds

        return load

    @property
    def _following(self) -> list[_Following]:
        return [each for each in (self._present, self._next) if each is not None]

    @property
    def round_optimizer(self) -> Optimizer:
        """The optimizer of this round."""
        return self.optimizer if self._present is None else self._present.optimizer

    @property
    def next_optimizer(self) -> Optimizer:
        """The optimizer of the next round."""
        return self.round_optimizer if self._next is None else self._next.optimizer

    def growth(self, optimizer: Optimizer, *, at_once: bool) -> int:
        """Returns the most bytes that `stage_optimizer` takes."""
        return 0 if optimizer.keeps_state_of(self._before(at_once)) else self.slot_bytes(optimizer)

    def stage_optimizer(self, optimizer: Optimizer, *, at_once: bool) -> Callable[[], None]:
        """Prepares to go on with another optimizer; returns the function that does, which cannot fail.

        The state stays if it is that of the same optimizer with other settings; otherwise a new one begins.

        Args:
            optimizer: The optimizer.
            at_once: Whether to begin with this round rather than the next one.

        Raises:
            MemoryError: There is not enough memory.
        """
        keeps = optimizer.keeps_state_of(self._before(at_once))
        following = _Following(optimizer, None if keeps else self._new_slots(optimizer, None))

        def change() -> None:
            if at_once:
                self._present, self._next = following, None
            else:
                self._next = following

        return change

    def _before(self, at_once: bool) -> Optimizer:
        return self.optimizer if at_once else self.round_optimizer

    def _begin_present(self) -> None:
        following, self._present = self._present, None
        if following is not None:
            self.optimizer = following.optimizer
            if following.slots is not None:
                self._slots = following.slots
                self.component_steps = dict.fromkeys(self.spec.by_name, 0)

    def stage_step(
        self, memory: Sequence[Array] | None
    ) -> Callable[[Mapping[str, ReducedUpdate], Optimizer, float], Mapping[str, Array]]:
        """Prepares the next version; returns the function that makes it, which cannot fail.

        That takes the updates by component, the optimizer of this round, and the factor of its learning rate.
        Components without an update keep their values. It returns the version, whose arrays never change.

        Args:
            memory: The arrays of the version, in the order of the components; None for new ones.

        Raises:
            MemoryError: There is not enough memory.
        """
        spec, place = self.spec, self._place
        version = dict(zip(spec.by_name, memory, strict=True)) if memory is not None else {}
        for component in spec.components:
            if component.name not in version:
                version[component.name] = place.allocate(spec.shapes[component.name], component.dtype)
        wide = {name: place.allocate(spec.shapes[name], spec.masters[name]) for name in self.narrow}

        def step(updates: Mapping[str, ReducedUpdate], optimizer: Optimizer, lr_factor: float) -> Mapping[str, Array]:
            self._begin_present()
            results = {**version, **wide}
            steps = [self._component_step(name, update, results[name]) for name, update in updates.items()]
            self.stepper.step(optimizer, lr_factor, steps)
            for name in updates:
                self.component_steps[name] += 1
                self._masters[name] = results[name]
            for name in [name for name in spec.by_name if name not in updates]:
                np.copyto(version[name], self.values[name])
                if name not in wide:
                    self._masters[name] = version[name]
            narrow = [name for name in wide if name in updates]
            if narrow:  # rounded to nearest even
                place.reducer.divide([wide[name] for name in narrow], 1.0, [version[name] for name in narrow])
            for array in version.values():
                place.protect(array)
            self.rounds += 1
            self._present, self._next = self._next, None
            self.values, self.digest = version, digest_of(version.values(), self.stepper.run_all)
            return version

        return step

    def check_loaded(self, loaded: Loaded, optimizer: Optimizer) -> None:
        """Checks values and state that are to be loaded.

        Raises:
            InvalidArgumentError: A component or a slot is missing or unknown, or of another shape, or the state belongs
                to another optimizer.
        """
        spec, state = self.spec, loaded.state
        _check_names(loaded.values, spec.by_name, "component", "values")
        for name, value in loaded.values.items():
            if value.shape != spec.shapes[name]:
                raise InvalidArgumentError(
                    f"expected values of shape {spec.shapes[name]} for component {name!r}, got {value.shape}",
                    field="values",
                )
            if loaded.is_immutable and value.dtype != spec.by_name[name].dtype:
                raise InvalidArgumentError(
                    f"expected values of {spec.by_name[name].dtype} for component {name!r}, got {value.dtype}",
                    field="values",
                )
        check_step(loaded.step)
        if state is None:
            return
        if not optimizer.keeps_state_of(state.optimizer):
            raise InvalidArgumentError(
                f"expected the state of {optimizer}, got that of {state.optimizer}", field="state.optimizer"
            )
        for count in (state.rounds, *state.component_steps.values()):
            if not 0 <= count <= MAX_LOADED_STEP:
                raise InvalidArgumentError(
                    f"expected counts of rounds from 0 to {MAX_LOADED_STEP}, got {count}", field="state"
                )
        expected = {slot.name for slot in optimizer.slots} | ({MASTER} if self.narrow else set())
        _check_names(state.slots, dict.fromkeys(expected), "slot", "state.slots")
        for slot, values in state.slots.items():
            _check_names(
                values, self.narrow if slot == MASTER else spec.by_name, f"component of slot {slot!r}", "state.slots"
            )
            for name, value in values.items():
                if value.shape != spec.shapes[name] or value.dtype != spec.masters[name]:
                    raise InvalidArgumentError(
                        f"expected {spec.masters[name]} of shape {spec.shapes[name]} for slot {slot!r} of component "
                        f"{name!r}, got {value.dtype} of shape {value.shape}",
                        field="state.slots",
                    )

    @cached_property
    def narrow(self) -> Mapping[str, object]:
        """The components whose masters are wider than themselves."""
        return {each.name: None for each in self.spec.components if each.dtype != self.spec.masters[each.name]}

    def _component_step(self, name: str, update: ReducedUpdate, result: Array) -> ComponentStep:
        return ComponentStep(
            total=update.total,
            addend=update.addend,
            factor=update.factor,
            divisor=update.divisor,
            negate=self.spec.update is UpdateKind.DELTA,
            parameter=self._masters[name],
            slots=self._slots[name],
            result=result,
            step=self.component_steps[name] + 1,
        )

    def _new_slots(
        self, optimizer: Optimizer, kept: Mapping[str, Mapping[str, Array]] | None
    ) -> dict[str, tuple[Array, ...]]:
        slots: dict[str, tuple[Array, ...]] = {}
        for name in self.spec.by_name:
            arrays = []
            for slot in optimizer.slots:
                array = self._place.allocate(self.spec.shapes[name], self.spec.masters[name])
                array[...] = slot.initial_value if kept is None else kept[slot.name][name]
                arrays.append(array)
            slots[name] = tuple(arrays)
        return slots

    def _copied(self, array: Array, name: str) -> Array:
        copied: Array = self._place.allocate(self.spec.shapes[name], self.spec.masters[name])
        np.copyto(copied, array)
        return copied


def _check_names(given: Iterable[str], expected: Mapping[str, object], what: str, field: str) -> None:
    """Checks that all that is expected is given, and nothing else."""
    found = set(given)
    missing, more = expected.keys() - found, found - expected.keys()
    if missing:
        raise InvalidArgumentError(f"expected every {what}, got none for {listed(sorted(missing))}", field=field)
    if more:
        raise InvalidArgumentError(f"expected no other {what}, got {listed(sorted(more))}", field=field)
