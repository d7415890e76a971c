"""The fixed properties of an accumulator."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from sys import getsizeof
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_AGREEMENT, MAX_NAME_BYTES, check_count, check_length, listed, quoted
from gradserve_server.storage.journal import Durability

DType = np.dtype[Any]


FLOAT_DTYPES: tuple[DType, ...] = (
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float32),
    np.dtype(np.float64),
)
"""The dtypes that a component can have."""


_MANY_DIFFERENCES = 10


_BY_DEFAULT = ("durability", "device")
"""The properties that the server chooses if a spec has None."""


_PART_BYTES, _SIZE_BYTES, _PIECE_BYTES = 768, 40, 256
"""The memory of a component, of one size of a shape, and of a piece."""


class Reduction(Enum):
    """The way in which the gradients of a round are combined."""

    MEAN = "MEAN"
    SUM = "SUM"


class Layout(Enum):
    """The format of a gradient."""

    DENSE = "DENSE"
    SPARSE = "SPARSE"


class PartialShape(NamedTuple):
    """A shape that may be only partly known.

    Attributes:
        dims: One size per dimension, -1 if unknown; None if the rank is unknown.
    """

    dims: tuple[int, ...] | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Returns True if a tensor of `shape` fits this shape."""
        if self.dims is None or self.dims == shape:
            return True
        return len(self.dims) == len(shape) and all(
            known in (-1, size) for known, size in zip(self.dims, shape, strict=True)
        )

    def __str__(self) -> str:
        """Returns the shape as TensorFlow writes it: `[?,3]`, `[]`, `<unknown>`."""
        return "<unknown>" if self.dims is None else shape_text(self.dims)


def shape_text(dims: tuple[int, ...]) -> str:
    """Returns a shape as TensorFlow writes it, with `?` for -1."""
    return "[" + ",".join("?" if size == -1 else str(size) for size in dims) + "]"


class Piece(NamedTuple):
    """The rows of a component on one server.

    Attributes:
        server: The index of the server.
        num_rows: The number of rows; 0 for the whole component.
    """

    server: int
    num_rows: int

    def __repr__(self) -> str:
        return f"{self.num_rows or 'all'} rows on server {self.server}"


class ComponentSpec(NamedTuple):
    """One tensor of an accumulator. A tuple, which is quick to create and compare."""

    name: str
    dtype: DType
    shape: PartialShape = PartialShape()
    layout: Layout = Layout.DENSE
    pieces: tuple[Piece, ...] = ()
    """The rows on each server, if the accumulator is sharded."""

    @property
    def is_sparse(self) -> bool:
        """True if its gradients are rows."""
        return self.layout is Layout.SPARSE

    @property
    def field(self) -> str:
        """The path of its gradient in a request, for errors."""
        return f"gradient[{self.name}]" if self.name else "gradient"

    def part_on(self, server: int) -> "ComponentSpec | None":
        """Returns the spec of its rows on a server; None if there are none."""
        for piece in self.pieces:
            if piece.server == server:
                dims = self.shape.dims
                known = self.shape if not piece.num_rows or dims is None else PartialShape((piece.num_rows, *dims[1:]))
                return self._replace(shape=known, pieces=())
        return None

    def differences(self, other: "ComponentSpec") -> list[str]:
        """Returns the differences from a component of the same name, in words."""
        return [
            f"{name} of component {quoted(self.name)} is {_text(getattr(self, name))}, "
            f"not {_text(getattr(other, name))}"
            for name in ("dtype", "shape", "layout", "pieces")
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class AccumulatorSpec:
    """The fixed properties of an accumulator.

    Attributes:
        components: One or more components, with distinct names.
        reduction: The way in which a round becomes one gradient.
        accumulate_dtype: The dtype of the running sums; None for float32 for 16-bit components, and the component's
            dtype for others.
        deterministic: Whether to sum in the order of workers rather than of arrival.
        keep_averages: The number of past rounds whose averages are kept.
        one_per_worker: Whether to count only the first gradient of each worker in a round.
        refuse_non_finite: Whether to refuse gradients with infinite values or NaN.
        durability: How much survives the end of the server; None for the server's default.
        device: The name of the device in whose memory it is; None for the server's default.
        agreement: Opaque labels that every client opening the accumulator must agree on, by name.
        num_shards: The number of servers over which it is sharded; 0 if it is not sharded.

    Raises:
        InvalidArgumentError: A property is not valid.
    """

    components: tuple[ComponentSpec, ...]
    reduction: Reduction = Reduction.MEAN
    accumulate_dtype: DType | None = None
    deterministic: bool = False
    keep_averages: int = 1
    one_per_worker: bool = False
    refuse_non_finite: bool = False
    durability: Durability | None = None
    device: str | None = None
    agreement: Mapping[str, str] = field(default_factory=dict)
    num_shards: int = 0

    def __post_init__(self) -> None:
        if not self.components:
            raise InvalidArgumentError("expected at least one component, got none", field="spec.components")
        if self.keep_averages < 1:
            raise InvalidArgumentError(
                f"expected keep_averages of at least 1, got {self.keep_averages}", field="spec.keep_averages"
            )
        seen: set[str] = set()
        for index, component in enumerate(self.components):
            self._check_component(component, f"spec.components[{index}]", seen)
            seen.add(component.name)
            self._check_pieces(component, f"spec.components[{index}]")
        if self.num_shards < 0:
            raise InvalidArgumentError(
                f"expected num_shards of at least 0, got {self.num_shards}", field="spec.num_shards"
            )

    def _check_component(self, component: ComponentSpec, field: str, seen: set[str]) -> None:
        if component.name in seen:
            raise InvalidArgumentError(
                f"expected distinct component names, got {quoted(component.name)} twice", field=f"{field}.name"
            )
        if not component.name and len(self.components) > 1:
            raise InvalidArgumentError(
                "expected a name for each of several components, got an empty one", field=f"{field}.name"
            )
        if component.dtype not in FLOAT_DTYPES:
            known = ", ".join(str(dtype) for dtype in FLOAT_DTYPES)
            raise InvalidArgumentError(
                f"expected a dtype out of {known}, got {component.dtype}", field=f"{field}.dtype"
            )
        for size in component.shape.dims or ():
            if size < -1:
                raise InvalidArgumentError(
                    f"expected dimensions of at least -1, got {size}", field=f"{field}.shape.dims"
                )
        if self.accumulate_dtype is not None and (
            self.accumulate_dtype not in FLOAT_DTYPES
            or not np.can_cast(component.dtype, self.accumulate_dtype, casting="safe")
        ):
            raise InvalidArgumentError(
                f"expected an accumulate_dtype that holds every {component.dtype}, got {self.accumulate_dtype}",
                field="spec.accumulate_dtype",
            )

    def _check_pieces(self, component: ComponentSpec, field: str) -> None:
        check_servers(component.pieces, self.num_shards, component.name, field)
        if not self.num_shards:
            return
        dims, is_sparse = component.shape.dims, component.is_sparse
        if dims is None or (is_sparse and not dims) or -1 in dims[is_sparse:]:
            raise InvalidArgumentError(
                f"expected a known shape of component {quoted(component.name)} in a sharded accumulator, got "
                f"{component.shape}",
                field=f"{field}.shape",
            )
        check_rows(component.pieces, None if is_sparse or not dims else dims[0], component.name, field)

    @cached_property
    def by_name(self) -> dict[str, ComponentSpec]:
        """The components by name."""
        return {component.name: component for component in self.components}

    def derive(self, server: int = 0) -> None:
        """Computes the cached properties now, in this thread: that takes long for many components."""
        if self.num_shards and (shard := self.shard(server)) is not None:
            shard.derive()
        self.by_name  # noqa: B018 - it is kept
        self.bookkeeping_bytes  # noqa: B018
        self.dense_sum_dtypes  # noqa: B018
        self.sums_have_dtypes_of_components  # noqa: B018

    def shard(self, server: int) -> "AccumulatorSpec | None":
        """Returns the spec of one server's shard; None if the server has no components.

        Its gradients are summed in the order that the home decides.
        """
        shards = self._shards
        if server not in shards:
            parts = [part for each in self.components if (part := each.part_on(server)) is not None]
            shards[server] = (
                replace(self, components=tuple(parts), num_shards=0, deterministic=True, agreement={})
                if parts
                else None
            )
        return shards[server]

    @cached_property
    def _shards(self) -> "dict[int, AccumulatorSpec | None]":
        return {}

    def only(self, names: Iterable[str]) -> Self:
        """Returns a copy with some of the components, for a gradient that has no others; it may have none."""
        components = tuple([self.by_name[name] for name in names])
        return replace(self, components=components) if components else self.without_components()

    def in_order(self, *, of_workers: bool) -> Self:
        """Returns a copy whose gradients are summed in the order of their workers, or as they arrive."""
        other = copy(self)
        object.__setattr__(other, "deterministic", of_workers)
        return other

    def without_components(self) -> Self:
        """Returns a copy without components: that of the home of a sharded accumulator, which gets no values."""
        decision = copy(self)
        for derived in set(vars(decision)) - set(self.__dataclass_fields__):
            del vars(decision)[derived]
        object.__setattr__(decision, "components", ())
        object.__setattr__(decision, "deterministic", False)
        return decision

    @cached_property
    def num_parts(self) -> int:
        """The number of components and of their dimensions."""
        return len(self.components) + sum([len(each.shape.dims or ()) for each in self.components])

    @cached_property
    def bookkeeping_bytes(self) -> int:
        """The measured memory of the components and the agreement, beside tensors."""
        texts = sum([getsizeof(component.name) for component in self.components]) + agreement_bytes(self.agreement)
        texts += _PIECE_BYTES * sum([len(component.pieces) for component in self.components])
        return _PART_BYTES * len(self.components) + _SIZE_BYTES * (self.num_parts - len(self.components)) + texts

    def resolved(self, durability: Durability, device: str | None) -> Self:
        """Returns a copy with another durability and device."""
        other = self.on(device)
        object.__setattr__(other, "durability", durability)
        return other

    def on(self, device: str | None) -> Self:
        """Returns a copy with another device."""
        other = copy(self)  # rather than `replace`, which would check all components again
        object.__setattr__(other, "device", device)
        return other

    @cached_property
    def dense_components(self) -> tuple[ComponentSpec, ...]:
        """The components whose gradients are dense."""
        return tuple(each for each in self.components if not each.is_sparse)

    def sum_dtype(self, component: ComponentSpec) -> DType:
        """Returns the dtype in which a component is summed."""
        if self.accumulate_dtype is not None:
            return self.accumulate_dtype
        return np.dtype(np.float32) if component.dtype.itemsize == 2 else component.dtype

    @cached_property
    def dense_sum_dtypes(self) -> dict[str, DType]:
        """The dtypes in which the dense components are summed."""
        return {each.name: self.sum_dtype(each) for each in self.dense_components}

    @cached_property
    def of_sums(self) -> Self:
        """A copy whose dense components have the dtypes in which they are summed, for sums of gradients."""
        if self.sums_have_dtypes_of_components:
            return self
        dtypes = self.dense_sum_dtypes
        return replace(
            self,
            components=tuple(
                each._replace(dtype=dtypes[each.name]) if each.name in dtypes else each for each in self.components
            ),
        )

    @cached_property
    def sums_have_dtypes_of_components(self) -> bool:
        """True if dense sums are in the dtypes of their averages."""
        return all(each.dtype == self.sum_dtype(each) for each in self.dense_components)

    def differences(self, other: "AccumulatorSpec") -> list[str]:
        """Returns the differences from `other`, in words; of many, only the first.

        The order of the components does not matter.
        """
        found = [
            f"{name} is {_text(getattr(self, name))}, not {_text(getattr(other, name))}"
            for name in (
                "reduction",
                "accumulate_dtype",
                "deterministic",
                "keep_averages",
                "one_per_worker",
                "refuse_non_finite",
                "durability",
                "device",
                "num_shards",
            )
            if (name not in _BY_DEFAULT or getattr(other, name) is not None)
            and _differ(getattr(self, name), getattr(other, name))
        ]
        found += agreement_differences(self.agreement, other.agreement)
        theirs = other.by_name
        if self.by_name == theirs:
            return found
        if self.by_name.keys() != theirs.keys():
            return [f"components are {listed(self.by_name)}, not {listed(theirs)}", *found]
        for ours in self.components:
            their = theirs[ours.name]
            if ours != their:
                found += ours.differences(their)
            if len(found) > _MANY_DIFFERENCES:
                return [*found, "and maybe more"]
        return found


def _differ(ours: object, theirs: object) -> bool:
    # None apart: NumPy takes it for float64.
    return (ours is None) != (theirs is None) or ours != theirs


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


# Pieces


def check_servers(pieces: Sequence[Piece], num_shards: int, component: str, field: str) -> None:
    """Checks the servers of a component of an accumulator.

    Args:
        pieces: What each server has of it.
        num_shards: The number of servers over which the accumulator is sharded; 0 if it is not sharded.
        component: The component's name, for messages.
        field: Its path in the request.

    Raises:
        InvalidArgumentError: Pieces are missing or not allowed, or a server is unknown or there twice.
    """
    if not num_shards:
        if pieces:
            raise InvalidArgumentError(
                f"expected no pieces of component {quoted(component)} without num_shards, got {len(pieces)}",
                field=f"{field}.pieces",
            )
        return
    servers = [each.server for each in pieces]
    if not pieces or len(set(servers)) < len(servers) or not all(0 <= each < num_shards for each in servers):
        raise InvalidArgumentError(
            f"expected pieces of component {quoted(component)} on different servers from 0 to {num_shards - 1}, got "
            f"servers {servers}",
            field=f"{field}.pieces",
        )


def check_rows(pieces: Sequence[Piece], num_rows: int | None, component: str, field: str) -> None:
    """Checks that the pieces of a component have all its rows, which are `num_rows`; None if it cannot be divided.

    Raises:
        InvalidArgumentError: They do not.
    """
    rows = [each.num_rows for each in pieces]
    if rows == [0] or (num_rows is not None and min(rows) >= 1 and sum(rows) == num_rows):
        return
    expected = "one piece of 0 rows" if num_rows is None else f"pieces of {num_rows} rows in all, or one of 0"
    raise InvalidArgumentError(
        f"expected {expected} of component {quoted(component)}, got {rows}", field=f"{field}.pieces"
    )


# Agreements

_AGREEMENT_FIELD = "spec.agreement"


_MOST_SHOWN = 10


_OF_TRAINING_RUNS = "num_required"
"""The label that workers of `gradserve.training`, and of the packages that build on it, agree on; others do not."""


_OTHER_WORKERS = (
    "workers of gradserve.torch, gradserve.jax and gradserve.training share a run with each other, not with workers "
    "that make the calls themselves, as these exchange the parameters in another way; with parameters that the server "
    "holds (client.parameters), all can: see docs/other_languages.md#which-workers-can-share-a-run"
)


def check_agreement(agreement: Mapping[str, str]) -> None:
    """Checks that an agreement is within the limits of the contract.

    Raises:
        InvalidArgumentError: It has too many entries, an empty name, or a name or value that is too long.
    """
    check_count(agreement, MAX_AGREEMENT, "entries", _AGREEMENT_FIELD)
    for name, value in agreement.items():
        if not name:
            raise InvalidArgumentError(
                f"expected a name for each entry, got an empty one with the value {quoted(value)}",
                field=_AGREEMENT_FIELD,
            )
        check_length(name, MAX_NAME_BYTES, _AGREEMENT_FIELD)
        try:
            check_length(value, MAX_NAME_BYTES, _AGREEMENT_FIELD)
        except InvalidArgumentError as error:
            error.message = f"agreement[{quoted(name)}]: {error.message}"
            raise


def agreement_bytes(agreement: Mapping[str, str]) -> int:
    """Returns the memory that an agreement takes; 0 for none."""
    if not agreement:
        return 0
    return getsizeof(agreement) + sum([getsizeof(name) + getsizeof(value) for name, value in agreement.items()])


def agreement_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Returns the differences between two agreements, in words, sorted by name; of many, only the first."""
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = [
        f"agreement[{quoted(name)}] is {_quoted_or_absent(ours.get(name))}, not {_quoted_or_absent(theirs.get(name))}"
        for name in different[:_MOST_SHOWN]
    ]
    if len(different) > _MOST_SHOWN:
        found.append("and more of the agreement")
    if (_OF_TRAINING_RUNS in ours) != (_OF_TRAINING_RUNS in theirs):
        found.append(_OTHER_WORKERS)
    return found


def _quoted_or_absent(value: str | None) -> str:
    return "absent" if value is None else quoted(value)
