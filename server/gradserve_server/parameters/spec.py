"""The properties of parameters, some of which are rules that can change."""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Self

import numpy as np

from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, DType
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import listed, quoted
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.reductions.spec import Mean, Reduction
from gradserve_server.parameters.round_rules import RoundRules, Staleness
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability

_ALL_VERSIONS = (1 << 31) - 1


class UpdateKind(Enum):
    """The kind of update that workers push."""

    DELTA = "DELTA"
    """The worker's parameters minus the version from which it started. Their negated mean is the gradient."""
    GRADIENT = "GRADIENT"
    """The gradient of the loss."""


class Normalization(Enum):
    """The divisor of a mean, for each component."""

    WEIGHTS = "WEIGHTS"
    """The sum of the weights of the updates that have it."""
    COUNT = "COUNT"
    """The number of these updates, as in FedBuff."""


@dataclass(frozen=True)
class Rules:
    """The properties that may change while parameters exist.

    Attributes:
        optimizer: Makes the next version.
        rounds: Say when a round ends.
        schedule: The factor of the learning rate.
    """

    optimizer: Optimizer
    rounds: RoundRules
    schedule: Schedule = field(default_factory=Schedule)

    def learning_rate(self, num_applied: int) -> float:
        """Returns the learning rate of a round, after the schedule, when so many rounds have been applied before it."""
        return self.optimizer.learning_rate * self.schedule.factor(num_applied)


@dataclass(frozen=True)
class ParametersSpec:
    """The properties of parameters.

    Attributes:
        components: One or more dense components with known shapes, in the order of the creator.
        rules: The present rules.
        update: What workers push.
        staleness: How updates count that were computed from an older version.
        normalization: The divisor of a mean.
        reduction: How the updates of a round become one.
        clip_norm: The greatest norm of an update over all components; None for any.
        keep_versions: The number of versions that can be read, the newest included.
        deterministic: Whether to sum in the order of workers rather than of arrival.
        refuse_non_finite: Whether to refuse updates with infinite values or NaN.
        one_per_worker: Whether to count only the first update of each worker in a round.
        durability: How much survives the end of the server; None for the server's default.
        agreement: Opaque labels that every client must agree on, by name.
        keep_rounds: The number of rounds whose records are kept.
        num_shards: The number of servers over which they are sharded; 0 if they are on one.
        server: If they are sharded, the index of this server.
        follows: If they are sharded, whether another server is their home.

    Raises:
        InvalidArgumentError: A property is not valid.
    """

    components: tuple[ComponentSpec, ...]
    rules: Rules
    update: UpdateKind = UpdateKind.DELTA
    staleness: Staleness = field(default_factory=Staleness)
    normalization: Normalization = Normalization.WEIGHTS
    reduction: Reduction = field(default_factory=Mean)
    clip_norm: float | None = None
    keep_versions: int = 2
    deterministic: bool = False
    refuse_non_finite: bool = True
    one_per_worker: bool = True
    durability: Durability | None = None
    agreement: Mapping[str, str] = field(default_factory=dict)
    keep_rounds: int = 1000
    num_shards: int = 0
    server: int = 0
    follows: bool = False

    def __post_init__(self) -> None:
        for index, component in enumerate(self.components):
            _check_component(component, f"spec.components[{index}]")
        for name in ("keep_versions", "keep_rounds"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgumentError(f"expected {name} of at least 1, got {value}", field=f"spec.{name}")
        self.reduction.check_options(by_count=self.normalization is Normalization.COUNT, clip_norm=self.clip_norm)
        if self.clip_norm is not None and not self.refuse_non_finite:
            raise InvalidArgumentError(
                "expected clip_norm without accept_non_finite: an infinite norm cannot be clipped",
                field="spec.clip_norm",
            )
        self.reduction.check_rounds(self.rules.rounds)
        self.updates  # noqa: B018 - checks what accumulators check

    @cached_property
    def updates(self) -> AccumulatorSpec:
        """The spec of the rounds, in which versions are the averages."""
        return AccumulatorSpec(
            self.components,
            deterministic=self.deterministic,
            keep_averages=self.keep_versions,
            one_per_worker=self.one_per_worker,
            refuse_non_finite=self.refuse_non_finite,
            durability=self.durability,
            device="cpu",
            agreement=self.agreement,
            num_shards=self.num_shards,
        )

    @property
    def here(self) -> "ParametersSpec":
        """The spec of what is on this server: of sharded parameters, of its shard.

        Raises:
            InvalidArgumentError: It has no piece of any component.
        """
        return self._shard if self.num_shards else self

    @cached_property
    def _shard(self) -> "ParametersSpec":
        parts = [part for each in self.components if (part := each.part_on(self.server)) is not None]
        if not parts:
            raise InvalidArgumentError(
                f"expected a piece of a component on server {self.server}, got none", field="spec.components"
            )
        shard = replace(self, components=tuple(parts), num_shards=0, agreement={})
        if not self.follows:
            return shard
        # Its home says which versions it keeps, and has the records.
        durability = None if self.durability is None else self._durability_here(self.durability)
        return replace(shard, keep_versions=_ALL_VERSIONS, keep_rounds=1, durability=durability)

    def _durability_here(self, durability: Durability) -> Durability:
        """Returns the durability of rounds here. Away from the home, updates are written when they are staged."""
        return Durability.ROUND if self.follows and durability is Durability.GRADIENT else durability

    def placed(self, member: Member, key: ResourceKey) -> Self:
        """Returns a copy of sharded parameters for a server of their cluster."""
        other = copy(self)
        object.__setattr__(other, "server", member.index)
        object.__setattr__(other, "follows", not member.is_home(key))
        for name in ("_shard", "others"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def others(self) -> frozenset[int]:
        """The other servers with pieces of sharded parameters."""
        return frozenset(each.server for component in self.components for each in component.pieces) - {self.server}

    @property
    def measures_norms(self) -> bool:
        """True if the norm of an update over all components counts, or is reported."""
        return self.clip_norm is not None or self.reduction.holds_updates

    @property
    def measures_distances(self) -> bool:
        """True if the distances of updates over all components count."""
        return self.reduction.needs_all_components

    @property
    def adds_up(self) -> bool:
        """True if updates may be added up before they come: nothing looks at each, or at their order."""
        return not self.holds_updates and self.clip_norm is None

    @property
    def holds_updates(self) -> bool:
        """True if the updates of a round are held until it ends."""
        return self.deterministic or self.reduction.holds_updates

    @cached_property
    def by_name(self) -> dict[str, ComponentSpec]:
        """The components by name."""
        return {component.name: component for component in self.components}

    @cached_property
    def masters(self) -> dict[str, DType]:
        """The dtype of the master of each component: float64 for float64, float32 for all others."""
        wide = np.dtype(np.float64)
        return {each.name: wide if each.dtype == wide else np.dtype(np.float32) for each in self.components}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each component."""
        return {each.name: each.shape.dims or () for each in self.components}

    def derive(self) -> None:
        """Computes the cached properties now, in this thread: that takes long for many components."""
        self.updates.derive()
        if self.num_shards:
            self.here.derive()
            self.others  # noqa: B018 - it is kept
        self.by_name, self.masters, self.shapes, self.version_bytes, self._all_master_bytes  # noqa: B018 - they are kept

    def master_bytes(self, names: Mapping[str, object] | None = None) -> int:
        """Returns the memory of one array in the dtype of the masters, for each component or for these."""
        return self._all_master_bytes if names is None else self._bytes_of_masters(names)

    @cached_property
    def _all_master_bytes(self) -> int:
        return self._bytes_of_masters(self.masters)

    def _bytes_of_masters(self, names: Iterable[str]) -> int:
        return sum([math.prod(self.shapes[name]) * self.masters[name].itemsize for name in names])

    @cached_property
    def version_bytes(self) -> int:
        """The memory of a version as it is read."""
        return sum([math.prod(self.shapes[each.name]) * each.dtype.itemsize for each in self.components])

    @property
    def work(self) -> int:
        """The work of something that is done once for each element, in bytes; at least that for each array."""
        return max(self.version_bytes, PIECE_BYTES * len(self.components))

    def check_adds_up(self) -> None:
        """Checks that updates may be added up before they come.

        Raises:
            InvalidArgumentError: Something looks at each, or at their order.
        """
        if not self.adds_up:
            what = "clip_norm" if self.clip_norm is not None else f"reduction {self.reduction.name}"
            what = f"{what}, which looks at each" if not self.deterministic else "a deterministic order"
            raise InvalidArgumentError(
                f"expected single updates for {what}, got the sum of several: send them one by one", field="sum_of"
            )

    def of_update(
        self, names: Sequence[str], *, is_sum: bool = False, is_part: bool = False, is_wide: bool = False
    ) -> AccumulatorSpec:
        """Returns the spec of an update that has these components, or of the sum of several such updates.

        Args:
            names: The components.
            is_sum: Whether it is the sum of several updates.
            is_part: Whether it is one server's part of an update, which may have no components here.
            is_wide: Whether the values have the dtypes of sums, as those of a sum have.

        Raises:
            InvalidArgumentError: There are none, or one does not exist or comes twice, or the reduction needs all; or
                it is a sum, and each update is needed.
        """
        if is_sum:
            self.check_adds_up()
        known = self.by_name
        for index, name in enumerate(names):
            if name not in known:
                raise InvalidArgumentError(
                    f"expected components out of {listed(sorted(known))}, got {quoted(name)}",
                    field=f"update[{index}].name",
                )
        if not names and not is_part:
            raise InvalidArgumentError("expected at least one component, got none", field="update")
        if len(set(names)) < len(names):
            raise InvalidArgumentError("expected every component once, got one twice", field="update")
        self.reduction.check_update(names, tuple(known))
        spec = self.updates if len(names) == len(known) else self.updates.only(names)
        return spec.of_sums if is_sum or is_wide else spec

    def resolved(self, durability: Durability) -> Self:
        """Returns a copy with a durability."""
        other = copy(self)  # rather than `replace`, which would check all components again
        object.__setattr__(other, "durability", durability)
        vars(other)["updates"] = self.updates.resolved(durability, self.updates.device)
        if self.num_shards:
            vars(other)["_shard"] = self.here.resolved(self._durability_here(durability))
        return other

    def with_rules(self, rules: Rules) -> Self:
        """Returns a copy with other rules.

        Raises:
            InvalidArgumentError: They do not go with the other properties.
        """
        self.reduction.check_rounds(rules.rounds)
        other = copy(self)
        object.__setattr__(other, "rules", rules)
        return other

    def differences(self, other: "ParametersSpec") -> list[str]:
        """Returns the differences from what somebody else asks for, in words: names first, then shapes, then the rest.

        Rules are not compared, nor is a durability that was not asked for, and components may come in any order.
        """
        return (
            _names_that_differ(self, other) or _components_that_differ(self, other) or _others_that_differ(self, other)
        )


_COMPARED = (
    "num_shards",
    "update",
    "staleness",
    "normalization",
    "reduction",
    "clip_norm",
    "keep_versions",
    "deterministic",
    "refuse_non_finite",
    "one_per_worker",
    "keep_rounds",
)


def _names_that_differ(one: ParametersSpec, other: ParametersSpec) -> list[str]:
    missing, more = one.by_name.keys() - other.by_name.keys(), other.by_name.keys() - one.by_name.keys()
    found = []
    if missing:
        found.append(f"it has {listed(sorted(missing))}, which are not among yours")
    if more:
        found.append(f"it lacks {listed(sorted(more))}")
    return found


def _components_that_differ(one: ParametersSpec, other: ParametersSpec) -> list[str]:
    if one.by_name == other.by_name or one.num_shards != other.num_shards:
        return []  # their pieces differ with the number of servers, which is what to say
    return [difference for each in one.components for difference in each.differences(other.by_name[each.name])]


def _others_that_differ(one: ParametersSpec, other: ParametersSpec) -> list[str]:
    found = [
        f"{name} is {_text(getattr(one, name))}, not {_text(getattr(other, name))}"
        for name in _COMPARED
        if getattr(one, name) != getattr(other, name)
    ]
    if other.durability not in (None, one.durability) and one.durability is not None:
        assert other.durability is not None
        found.append(f"durability is {one.durability.value}, not {other.durability.value}")
    for name in sorted(one.agreement.keys() | other.agreement.keys()):
        mine, yours = one.agreement.get(name), other.agreement.get(name)
        if mine != yours:
            found.append(f"agreement on {quoted(name)} is {_label(mine)}, not {_label(yours)}")
    return found


def _label(text: str | None) -> str:
    return "missing" if text is None else quoted(text)


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _check_component(component: ComponentSpec, field: str) -> None:
    if component.is_sparse:
        raise InvalidArgumentError(
            f"expected dense components, got sparse {quoted(component.name)}", field=f"{field}.layout"
        )
    dims = component.shape.dims
    if dims is None or -1 in dims:
        raise InvalidArgumentError(
            f"expected a known shape of component {quoted(component.name)}, got {component.shape}",
            field=f"{field}.shape",
        )
