"""The arithmetic of a round of parameters: updates are added up or held, and the optimizer makes the next version."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient, Packed, Value
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import DType
from gradserve_server.accumulators.sums.packed import unpacked_bytes
from gradserve_server.accumulators.sums.summation import HeldGradients, Staged, worker_order
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import AbortedError
from gradserve_server.parameters.reductions.choices import Decision, plan
from gradserve_server.parameters.reductions.exact import Terms, rounded
from gradserve_server.parameters.reductions.reduce import (
    Elsewhere,
    UpdateReport,
    clip_scale,
    measured_norm,
    norm_of,
    reduce_as_decided,
    reduce_updates,
)
from gradserve_server.parameters.reductions.spec import Sum
from gradserve_server.parameters.spec import Normalization, ParametersSpec, Rules
from gradserve_server.parameters.unpacking.adder import Addition
from gradserve_server.parameters.variables import ReducedUpdate, Variables


@dataclass(frozen=True, slots=True)
class _Addition:
    """An addition that is decided, but not carried out yet."""

    values: Mapping[str, Array]
    packed: Mapping[str, Packed]
    factor: float


@dataclass(slots=True)
class _Divisor:
    """The divisor of one component's mean, so far."""

    weight: float = 0.0
    count: int = 0

    def of(self, spec: ParametersSpec) -> float:
        if isinstance(spec.reduction, Sum):
            return 1.0
        return self.weight if spec.normalization is Normalization.WEIGHTS else float(self.count)


class RunningUpdates:
    """Adds each update to the sum when it arrives, as a `Summation`. Each component has the updates that have it.

    The latest update is added by `finish`, or together with the division and the optimizer's step if it ends the round.
    Packed components are unpacked block by block as they are added, unless they have to be clipped before.
    """

    def __init__(self, variables: Variables, rules: Callable[[], Rules], place: Place) -> None:
        """`rules` returns the rules of the present round."""
        self._variables = variables
        self._spec = variables.spec
        self._rules = rules
        self._place = place
        self._sums: dict[str, Array] = {}
        self._divisors: dict[str, _Divisor] = {}
        self._nbytes = 0
        self._pending: _Addition | None = None
        self._first: frozenset[str] = frozenset()
        """The components of the pending addition whose sums are empty."""
        self._reports: list[UpdateReport] = []
        """The reports of all updates, with clip_norm."""

    divides_in_place = False

    @property
    def takes_packed(self) -> bool:
        """True unless updates are clipped, by their norms."""
        return self._spec.clip_norm is None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each component."""
        return self._spec.shapes

    @property
    def nbytes(self) -> int:
        """The memory of the sums, of the optimizer's state, and of masters beside the newest version."""
        return self._nbytes + self._variables.nbytes

    @property
    def result_nbytes(self) -> int:
        """The memory that the next version takes in addition, with new masters beside it."""
        return self._spec.version_bytes + self._spec.master_bytes(self._variables.narrow)

    def growth(self, gradient: Gradient) -> int:
        """Returns the most bytes of the memory budget that adding an update takes."""
        packed = {name: value for name, value in gradient.packed.items() if name not in self._sums}
        return unpacked_bytes(packed, self._spec.masters) + sum(
            [
                value.size * self._spec.masters[name].itemsize
                for name, value in gradient.dense.items()
                if name not in self._sums and not self._is_adoptable(name, value, owned=gradient.is_adoptable)
            ]
        )

    def adopted(self, gradient: Gradient) -> int:
        """Returns the bytes of an adoptable update's memory that adding it takes over."""
        return sum(
            [
                value.nbytes
                for name, value in gradient.dense.items()
                if name not in self._sums and self._is_adoptable(name, value, owned=True)
            ]
        )

    def stage(
        self, gradient: Gradient, contribution: Contribution, memory: Sequence[Array] | None = None
    ) -> Staged[None]:
        """Prepares the addition of a checked update, which must not change until `finish`.

        Raises:
            MemoryError: There is not enough memory.
        """
        self.finish()
        masters = self._spec.masters
        values = gradient.dense
        self._place.reducer.make_ready((value.dtype, masters[name]) for name, value in values.items())
        begun: dict[str, Array] = {}
        for name, value in values.items():
            if name not in self._sums:
                is_adopted = self._is_adoptable(name, value, owned=gradient.is_adoptable)
                begun[name] = value if is_adopted else self._place.allocate(value.shape, masters[name])
        packed = gradient.packed
        for name, packed_value in packed.items():
            if name not in self._sums:
                begun[name] = self._place.allocate(packed_value.shape, masters[name])
        factor, reports = contribution.factor, self._reports
        report = self._clipped(values, contribution)
        if report is not None:
            factor = report.factor * report.scale
        if report is not None and report.is_dropped:  # its norm is infinite or NaN, and so would be the sum
            return Staged(lambda: reports.append(report))

        def commit() -> None:
            if report is not None:
                reports.append(report)
            self._sums |= begun
            self._nbytes += sum([each.nbytes for each in begun.values()])
            self._pending, self._first = _Addition(values, packed, factor), frozenset(begun)
            for name in (*values, *packed):
                divisor = self._divisors.setdefault(name, _Divisor())
                divisor.weight += contribution.weight
                divisor.count += contribution.num_gradients

        return Staged(commit)

    def _clipped(self, values: Mapping[str, Array], contribution: Contribution) -> UpdateReport | None:
        """Returns how much an update counts if its norm is limited."""
        limit, share = self._spec.clip_norm, contribution.share
        if limit is None:
            return None
        if share is not None:
            return UpdateReport(None, share.scale, None, not share.factor, share.factor)
        elsewhere = [each.squared_norm for each in contribution.measured]
        stepper = self._variables.stepper
        norm = rounded(measured_norm(values, stepper.map, stepper.exact), *elsewhere)
        scale = clip_scale(norm, limit)
        return UpdateReport(norm_of(norm), scale or 1.0, None, not scale, contribution.factor if scale else 0.0)

    @property
    def pending_work(self) -> int:
        """The number of bytes that `finish` processes."""
        addition = self._pending
        return (
            0 if addition is None else sum([self._sums[name].nbytes for name in (*addition.values, *addition.packed)])
        )

    def finish(self) -> None:
        """Adds the latest update to the sums, unless the end of the round did. Cannot fail."""
        addition, self._pending = self._pending, None
        if addition is None:
            return
        self._add_packed(addition)
        reducer = self._place.reducer
        for is_first in (True, False):
            names = [name for name in addition.values if (name in self._first) is is_first]
            if not names:
                continue
            values, sums = [addition.values[name] for name in names], [self._sums[name] for name in names]
            if is_first:
                reducer.scale(values, addition.factor, sums)
            else:
                reducer.add_scaled(sums, values, addition.factor)

    def _add_packed(self, addition: _Addition) -> None:
        """Adds the packed components of an update, of which the step of an optimizer knows nothing."""
        additions = [
            Addition(value, self._sums[name], is_first=name in self._first) for name, value in addition.packed.items()
        ]
        self._variables.stepper.packed.add(additions, addition.factor)

    @property
    def averaging_work(self) -> int:
        """The number of bytes that `stage_average` processes: none."""
        return 0

    def stage_average(self, total_weight: float, memory: Sequence[Array] | None = None) -> Staged[dict[str, Value]]:
        """Prepares the optimizer's step, whose result is the next version; committing it begins the next round.

        Raises:
            MemoryError: There is not enough memory.
        """
        step = self._variables.stage_step(memory)

        def end() -> dict[str, Value]:
            addition, self._pending = self._pending, None
            rules, variables = self._rules(), self._variables
            if addition is not None:
                self._add_packed(addition)
            updates = {}
            for name, begun in self._sums.items():
                addend = None if addition is None else addition.values.get(name)
                updates[name] = ReducedUpdate(
                    total=None if addend is not None and name in self._first else begun,
                    addend=addend,
                    factor=1.0 if addition is None else addition.factor,
                    divisor=self._divisors[name].of(self._spec),
                )
            version = step(updates, rules.optimizer, rules.schedule.factor(variables.rounds))
            variables.reports = tuple(self._reports)
            self.drop()
            return dict(version)

        return Staged(end, 2 * self._nbytes + self._variables.nbytes + self._spec.version_bytes)

    def drop(self) -> None:
        """Drops the sums."""
        self._pending = None
        self._sums, self._divisors, self._nbytes, self._first = {}, {}, 0, frozenset()
        self._reports = []

    def _is_adoptable(self, name: str, value: Array, *, owned: bool) -> bool:
        return owned and value.dtype == self._spec.masters[name] and self._place.may_be_written(value)


class HeldUpdates(HeldGradients):
    """Holds the updates of a round, as a `Summation`, and reduces them at its end.

    With `deterministic`, in the order of (worker_id, sequence), so the same updates give the same bits in whatever
    order they arrive.
    """

    def __init__(self, variables: Variables, rules: Callable[[], Rules], place: Place) -> None:
        """`rules` returns the rules of the present round."""
        super().__init__(place)
        self._variables = variables
        self._spec = variables.spec
        self._rules = rules

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each component."""
        return self._spec.shapes

    @property
    def nbytes(self) -> int:
        """The memory of the updates, of the optimizer's state, and of masters beside the newest version."""
        return super().nbytes + self._variables.nbytes

    @property
    def result_nbytes(self) -> int:
        """The memory of the next version, of new masters beside it, and of the reduced update if there is one."""
        spec = self._spec
        reduced = spec.master_bytes() if self._held else 0
        return spec.version_bytes + spec.master_bytes(self._variables.narrow) + reduced

    def stage(
        self, gradient: Gradient, contribution: Contribution, memory: Sequence[Array] | None = None
    ) -> Staged[None]:
        """Prepares to hold a checked update, or a copy of it if others may change it.

        Raises:
            AbortedError: It is one of sharded parameters, and its distance to another one was not measured.
            MemoryError: There is not enough memory.
        """
        if contribution.measured and self._spec.measures_distances:
            for other, _ in self._held:
                _distances_of(other, contribution)
        return super().stage(gradient, contribution, memory)

    @property
    def averaging_work(self) -> int:
        """The number of bytes that `stage_average` processes, which includes the reduction."""
        return 2 * super().nbytes + PIECE_BYTES * len(self._held)

    def stage_average(self, total_weight: float, memory: Sequence[Array] | None = None) -> Staged[dict[str, Value]]:
        """Reduces the updates, and prepares the optimizer's step; committing it begins the next round.

        Raises:
            MemoryError: There is not enough memory.
        """
        spec, variables = self._spec, self._variables
        order: Sequence[int] = range(len(self._held))
        if spec.deterministic:
            order = sorted(order, key=lambda index: worker_order(self._held[index][0]))
        contributions = [self._held[index][0] for index in order]
        updates = _of_one_dtype([self._held[index][1].dense for index in order], spec.masters)
        names, by_count = tuple(spec.by_name), spec.normalization is Normalization.COUNT
        decision = self._decided(contributions)
        reports: tuple[UpdateReport, ...] = ()
        if decision is not None:
            reduced = reduce_as_decided(decision, names, updates, variables.stepper.map)
        else:
            reduced, report = reduce_updates(
                spec.reduction,
                names,
                updates,
                [each.weight for each in contributions],
                by_count=by_count,
                clip_norm=spec.clip_norm,
                elsewhere=self._elsewhere(contributions),
                parallel=variables.stepper.map,
                exact=variables.stepper.exact,
            )
            in_order = sorted(zip(order, report.updates, strict=True), key=itemgetter(0))
            reports = tuple([each for _, each in in_order])
        step = variables.stage_step(memory)

        def end() -> dict[str, Value]:
            rules = self._rules()
            updates = {name: ReducedUpdate(value, None, 1.0, 1.0) for name, value in reduced.items()}
            version = step(updates, rules.optimizer, rules.schedule.factor(variables.rounds))
            variables.reports = reports
            self.drop()
            return dict(version)

        return Staged(end, variables.nbytes + spec.version_bytes)

    def _decided(self, contributions: Sequence[Contribution]) -> Decision | None:
        """Returns what the home of sharded parameters has decided; None if this is the home."""
        shares = [each.share for each in contributions if each.share is not None]
        if not shares:
            return None
        by_count = self._spec.normalization is Normalization.COUNT
        divisor, order, note = plan(self._spec.reduction, len(shares), by_count=by_count)
        scales, factors = zip(*shares, strict=True)
        return Decision(scales, factors, divisor, order, (False,) * len(shares), note)

    def _elsewhere(self, contributions: Sequence[Contribution]) -> Elsewhere | None:
        """Returns what the other servers of sharded parameters have measured; None without other servers."""
        if not any(each.part for each in contributions):
            return None
        if not self._spec.measures_norms:  # norms of the pieces that are here would be none of updates
            return Elsewhere([[(math.inf,)]] * len(contributions))
        norms = [[each.squared_norm for each in one.measured] for one in contributions]
        pairs = combinations(contributions, 2) if self._spec.measures_distances else ()
        return Elsewhere(norms, [_distances_of(*pair) for pair in pairs])


def _distances_of(one: Contribution, other: Contribution) -> list[Terms]:
    """Returns the squared distances of two updates of sharded parameters on the other servers."""
    found = []
    for mine, theirs in zip(one.measured, other.measured, strict=True):
        distance = mine.squared_distances.get(other.part) or theirs.squared_distances.get(one.part)
        if distance is None:
            raise AbortedError(
                f"server {mine.server} of the cluster has not measured how far this update is from one that is in the "
                "round, as it never held both: stage it again",
                field="update",
            )
        found.append(distance)
    return found


def _of_one_dtype(updates: Sequence[dict[str, Array]], masters: Mapping[str, DType]) -> Sequence[Mapping[str, Array]]:
    """Returns updates with each component in one dtype: that of its master if some came packed, and others did not."""
    dtypes: dict[str, set[DType]] = {}
    for update in updates:
        for name, value in update.items():
            dtypes.setdefault(name, set()).add(value.dtype)
    mixed = {name for name, found in dtypes.items() if len(found) > 1}
    if not mixed:
        return updates
    return [
        {name: value.astype(masters[name], copy=False) if name in mixed else value for name, value in update.items()}
        for update in updates
    ]


def update_sum(variables: Variables, rules: Callable[[], Rules], place: Place) -> RunningUpdates | HeldUpdates:
    """Returns the arithmetic that the spec of variables asks for; `rules` returns the rules of the present round."""
    kind = HeldUpdates if variables.spec.holds_updates else RunningUpdates
    return kind(variables, rules, place)
