"""Builds the gradient of a request from the tensors that the request names."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from gradserve_server.accumulators.component_names import components_named
from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices, Value
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import FEW_PIECES, Compute
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.limits import listed, quoted
from gradserve_server.tensors.opening import OpenedTensors, TensorOpener
from gradserve_server.tensors.references import Reference

T = TypeVar("T")


@dataclass(frozen=True)
class GivenDense:
    """A dense value, not yet opened."""

    tensor: Reference


@dataclass(frozen=True)
class GivenSparse:
    """Rows of a larger tensor, not yet opened; see `SparseSlices`."""

    indices: Reference
    values: Reference
    dense_shape: tuple[int, ...] | None = None


GivenValue: TypeAlias = GivenDense | GivenSparse


@dataclass(frozen=True)
class GivenComponent:
    """A component as a request has it: without a name if it is the only one, and without a value by mistake."""

    name: str
    value: GivenValue | None


@dataclass
class GivenGradient:
    """A gradient as a request has it, to be used once.

    Attributes:
        components: The components, in the order of the request; none after the use.
        release: Whether to delete its stored tensors once it was accepted or dropped.
        finite: The names, as in the request, of components whose values are known to be finite.
    """

    components: Sequence[GivenComponent]
    release: bool = False
    finite: set[str] = field(default_factory=set)


async def use_gradient(
    opener: TensorOpener,
    compute: Compute,
    spec: AccumulatorSpec,
    place: Place,
    given: GivenGradient,
    use: Callable[[Gradient], Awaitable[T]],
) -> T:
    """Holds the tensors of a gradient, in host memory or anywhere, while a function uses them; returns what it returns.

    The gradient is then forgotten: a push_pull may wait long for others, and needs the memory no more.

    Args:
        opener: Opens the tensors.
        compute: Runs what takes long for many components.
        spec: The accumulator's spec.
        place: Where the accumulator is, which may take tensors wherever they are.
        given: The gradient as the request has it.
        use: The function.

    Raises:
        InvalidArgumentError: The components are not those of the spec, or a tensor is malformed.
        NotFoundError: A handle does not exist.
        MemoryError: There is no memory for tensors that must be copied to the host.
    """
    components, given.components = given.components, ()
    are_few = len(components) <= FEW_PIECES
    references = _references(components) if are_few else await compute.run_in_thread(_references, components)
    finite = frozenset([name or spec.components[0].name for name in given.finite])
    paths = partial(_component_paths, spec, components)
    with components_named("gradient", components):
        if are_few:
            with opener.open(references, release=given.release) as tensors:
                if not place.takes_from_anywhere and not tensors.is_on_host:
                    await tensors.bring_to_host()
                await _copy_rows(tensors, _rows(references))
                gradient = _gradient(spec, components, references, tensors, finite)
                with request_fields(paths):
                    return await use(gradient)
        async with opener.open_many(references, release=given.release) as tensors:
            if not place.takes_from_anywhere and not await compute.run_in_thread(lambda: tensors.is_on_host):
                await tensors.bring_to_host()
            await _copy_rows(tensors, await compute.run_in_thread(_rows, references))
            gradient = await compute.run_in_thread(_gradient, spec, components, references, tensors, finite)
            with request_fields(paths):
                return await use(gradient)


def _rows(references: Iterable[str]) -> list[str]:
    return [path for path in references if ".sparse." in path]


async def _copy_rows(tensors: OpenedTensors, rows: Sequence[str]) -> None:
    """Copies indices and values of rows: indices must not change once they are checked, and rows are used twice."""
    if rows:
        await tensors.copy_live(rows)


def _references(components: Sequence[GivenComponent]) -> dict[str, Reference]:
    references: dict[str, Reference] = {}
    for index, component in enumerate(components):
        value = component.value
        if isinstance(value, GivenDense):
            references[f"gradient[{index}].dense"] = value.tensor
        elif value is not None:
            references[f"gradient[{index}].sparse.indices"] = value.indices
            references[f"gradient[{index}].sparse.values"] = value.values
    return references


def _gradient(
    spec: AccumulatorSpec,
    components: Sequence[GivenComponent],
    references: Iterable[str],
    tensors: OpenedTensors,
    finite: frozenset[str],
) -> Gradient:
    values = _values(spec, components, tensors)
    live = any(tensors.is_live(path) for path in references)
    exclusive = tensors.exclusive
    memory = tensors.memory if exclusive else ()
    return Gradient(values, exclusive, memory, live=live, finite=finite, lenders=tensors.lenders)


def _component_paths(spec: AccumulatorSpec, components: Sequence[GivenComponent]) -> Mapping[str, str]:
    """Returns the path in the request for each component of `spec`."""
    if len(spec.components) == 1:
        return {spec.components[0].field: "gradient[0]"}
    fields = {component.name: component.field for component in spec.components}
    return {fields[given.name]: f"gradient[{index}]" for index, given in enumerate(components)}


def _values(spec: AccumulatorSpec, components: Sequence[GivenComponent], tensors: OpenedTensors) -> dict[str, Value]:
    by_name = spec.by_name
    values: dict[str, Value] = {}
    for index, given in enumerate(components):
        field = f"gradient[{index}]"
        name = given.name
        if not name and len(spec.components) == 1:
            name = spec.components[0].name
        if name not in by_name:
            known = listed(sorted(by_name))
            raise InvalidArgumentError(f"expected components {known}, got {quoted(name)}", field=f"{field}.name")
        if name in values:
            raise InvalidArgumentError(f"expected every component once, got {name!r} twice", field=f"{field}.name")
        values[name] = _value(by_name[name], given.value, tensors, field)
    if len(values) < len(by_name):
        missing = sorted(by_name.keys() - values.keys())
        raise InvalidArgumentError(f"expected every component, got none for {listed(missing)}", field="gradient")
    return values


def _value(component: ComponentSpec, given: GivenValue | None, tensors: OpenedTensors, field: str) -> Value:
    is_sparse = component.is_sparse
    if given is None or isinstance(given, GivenSparse) is not is_sparse:
        kind = "none" if given is None else "sparse" if isinstance(given, GivenSparse) else "dense"
        expected = "sparse" if is_sparse else "dense"
        raise InvalidArgumentError(
            f"expected a {expected} value for component {component.name!r}, got {kind}", field=field
        )
    if isinstance(given, GivenDense):
        dense: Array = tensors.in_place(f"{field}.dense")
        _check_values_dtype(component, tensors, dense, f"{field}.dense")
        return dense
    indices: Array = tensors[f"{field}.sparse.indices"]
    values: Array = tensors[f"{field}.sparse.values"]
    _check_dtype(indices, (np.dtype(np.int64), np.dtype(np.int32)), f"{field}.sparse.indices")
    _check_values_dtype(component, tensors, values, f"{field}.sparse.values")
    return SparseSlices(indices.astype(np.int64, copy=False), values, given.dense_shape)


def _check_values_dtype(component: ComponentSpec, tensors: OpenedTensors, array: Array, path: str) -> None:
    """Checks a dtype. Inline values were sent for this component; a stored tensor may be converted."""
    if not tensors.is_stored(path):
        _check_dtype(array, (component.dtype,), path)
    elif array.dtype.kind == "c":
        raise InvalidArgumentError(
            f"expected {component.dtype} or another real dtype, got {array.dtype}", field=f"{path}.dtype"
        )


def _check_dtype(array: Array, expected: tuple[np.dtype[np.generic], ...], path: str) -> None:
    if array.dtype not in expected:
        raise InvalidArgumentError(
            f"expected dtype {' or '.join(map(str, expected))}, got {array.dtype}", field=f"{path}.dtype"
        )
