"""The gradient of a request: checks of its arguments, its arrival beside the message, and its tensors."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from gradserve_protocol.codecs import Codec
from gradserve_server.accumulators.gradient import (
    Array,
    Contribution,
    Gradient,
    OpenGradient,
    Packed,
    SparseSlices,
    Value,
)
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import AbortedError, InvalidArgumentError, ServiceError, request_fields
from gradserve_server.limits import listed, quoted
from gradserve_server.tensors.incoming import IncomingTensor, IncomingTensors, TensorOpener
from gradserve_server.tensors.payload import Payload

_WEIGHT_EXPONENTS = {
    "float16": (-14, 15),
    "bfloat16": (-64, 64),
    "float32": (-64, 64),
    "float64": (-512, 512),
}
"""The least and the greatest weight, as powers of two, by the dtype of sums. They leave half of the exponents of the
dtype for the values; sums in float16 allow every normal power of two."""


def check_contribution(name: str, spec: AccumulatorSpec, contribution: Contribution) -> None:
    """Checks the weights and the sender of a gradient for the accumulator `name`.

    Raises:
        InvalidArgumentError: A weight is not positive and finite, or too small or too large for the sums; a sum with a
            fixed order lacks the worker_id; or it is a sum with sparse components, whose rows are divided by the
            weights of the gradients that have them.
    """
    for index, each in enumerate(contribution.sum_of):
        check_weight(spec, each.weight, f"sum_of[{index}].weight")
    if contribution.sum_of:
        check_may_add(name, spec, "sum_of")
    check_weight(spec, contribution.weight, "weight")
    if spec.deterministic and not contribution.worker_id:
        raise InvalidArgumentError(
            f"expected a worker_id for deterministic accumulator {name!r}, got an empty one", field="worker_id"
        )


def check_weight(spec: AccumulatorSpec, weight: float, field: str) -> None:
    """Checks a weight.

    Raises:
        InvalidArgumentError: It is not positive and finite, or too small or too large for the sums.
    """
    if weight == 1.0:
        return
    if not (0 < weight < float("inf")):
        raise InvalidArgumentError(f"expected a positive, finite weight, got {weight:g}", field=field)
    for dtype in {spec.sum_dtype(each) for each in spec.components}:
        exponents = _WEIGHT_EXPONENTS[dtype.name]
        least, most = (2.0**exponent for exponent in exponents)
        if not (least <= weight <= most):
            raise InvalidArgumentError(
                f"expected a weight from 2^{exponents[0]} to 2^{exponents[1]} ({least:.2g} to {most:.2g}) for "
                f"gradients that are summed in {dtype.name}, got {weight:g}. A mean depends only on the ratio of "
                "weights: multiply those of all workers by the same factor",
                field=field,
            )


def check_may_add(name: str, spec: AccumulatorSpec, field: str) -> None:
    """Checks that a gradient for the accumulator `name` may be a sum of several.

    Args:
        name: The accumulator's name.
        spec: Its spec.
        field: The field of the error.

    Raises:
        InvalidArgumentError: There are sparse components, whose rows are divided by the weights of the gradients that
            have them.
    """
    if len(spec.dense_components) < len(spec.components):
        raise InvalidArgumentError(
            f"expected gradients one by one for accumulator {name!r}, which has sparse components, got the sum of "
            "several",
            field=field,
        )


def check_epoch(contribution: Contribution, epoch: int) -> None:
    """Checks that a gradient was staged in the current epoch: servers may have forgotten earlier ones.

    Raises:
        AbortedError: Another epoch has begun since.
    """
    if contribution.epoch not in (None, epoch):
        raise AbortedError(
            f"expected a gradient that was staged in epoch {epoch}, got one of epoch {contribution.epoch}: stage it "
            "again",
            field="epoch",
        )


def not_as_a_sum(reason: str) -> AbortedError:
    """Returns the error for a sum whose gradients do not all count, so that they must be sent one by one."""
    return AbortedError(f"{reason}: send the gradients of the sum one by one", field="sum_of")


class Named(Protocol):
    """A component of a request. Its name may be empty."""

    @property
    def name(self) -> str:
        """The name of the component."""
        ...


class components_named:  # noqa: N801
    """Prefixes the message of a block's error about a component with the name of the component.

    An index in a request says little about a model with a hundred components.
    """

    __slots__ = ("_components", "_field")

    def __init__(self, field: str, components: Sequence[Named]) -> None:
        self._field = field
        self._components = components

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Changes the message of an error."""
        if not isinstance(error, ServiceError):
            return
        place = re.match(rf"{re.escape(self._field)}\[(\d+)\]", error.field or "")
        name = self._components[int(place[1])].name if place else ""
        if name and quoted(name) not in error.message:
            error.message = f"component {quoted(name)}: {error.message}"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IncomingComponent:
    """A component of a request.

    Attributes:
        name: Its name; the only component may lack one.
        value: A dense value, or the rows of a sparse one; None is a mistake.
        indices: The row numbers of a sparse value; None for a dense one.
        dense_shape: The shape of the whole tensor of a sparse value, if it is given; see `SparseSlices`.
        codec: How the value is packed; None if it is not.
    """

    name: str
    value: IncomingTensor | None
    indices: IncomingTensor | None = None
    dense_shape: tuple[int, ...] | None = None
    codec: Codec | None = None

    @property
    def is_dense(self) -> bool:
        """True for a dense value that is not packed."""
        return self.value is not None and self.indices is None and self.codec is None


@dataclass(slots=True)
class IncomingGradient:
    """A gradient whose tensors are not open yet; it can be used once.

    Attributes:
        components: The components, in the order of the request; none after the use.
        tensors: Their tensors; none after the use.
        release: Whether to delete its stored tensors once it is accepted or dropped.
        path: The path of its components in the request.
        finite: The names, as in the request, of components whose values are known to be finite.
    """

    components: Sequence[IncomingComponent]
    tensors: IncomingTensors
    release: bool = False
    path: str = "gradient"
    finite: set[str] = field(default_factory=set)


_NO_TENSORS = IncomingTensors(())
_PART_BYTES = 4 << 20
"""The bytes of a tensor that are checked at a time, while they are still in the cache."""


class GradientReceiver:
    """Receives the gradients of requests: waits for them, checks their values as they arrive, and opens them."""

    def __init__(self, opener: TensorOpener, compute: Compute, reducer: Reducer) -> None:
        self._opener = opener
        self._compute = compute
        self._reducer = reducer

    async def receive(self, spec: AccumulatorSpec, place: Place, gradient: IncomingGradient) -> OpenGradient:
        """Waits until a gradient has arrived, and notes which components have finite values only.

        Leaves errors to the user of the gradient, which may be a known one.

        Args:
            spec: The accumulator's spec.
            place: The place of the accumulator, which may take tensors from any memory.
            gradient: The gradient.

        Returns:
            What opens the gradient.
        """
        payload = gradient.tensors.payload
        if spec.refuse_non_finite:
            for component in gradient.components:
                value = component.value
                if value is None or not component.is_dense or not value.is_own:
                    continue
                if not await self._is_finite(value.array, payload):
                    break
                gradient.finite.add(component.name)
        await payload.arrived()
        return partial(self.open, spec, place, gradient)

    async def _is_finite(self, values: Array, payload: Payload) -> bool:
        flat = values.reshape(-1)
        size = _PART_BYTES // values.itemsize
        for start in range(0, flat.size, size):
            part = flat[start : start + size]
            await payload.arrived(part)
            if await self._compute.run(part.nbytes, self._reducer.first_non_finite, [part]) is not None:
                return False
        return True

    async def open(
        self,
        spec: AccumulatorSpec,
        place: Place,
        gradient: IncomingGradient,
        use: Callable[[Gradient], Awaitable[T]],
    ) -> T:
        """Opens the tensors of a gradient while a function uses them; returns the result of the function.

        The gradient is forgotten afterwards: a push_pull may wait long for others without needing its memory.

        Raises:
            InvalidArgumentError: The components are not those of the spec, or a tensor is malformed.
            AbortedError: Likewise, in the memory of a caller that has left.
            NotFoundError: A handle does not exist.
            MemoryError: There is no memory for tensors that must be copied to the host.
        """
        path, components, gradient.components = gradient.path, gradient.components, ()
        incoming, gradient.tensors = gradient.tensors, _NO_TENSORS
        finite = frozenset(gradient.finite)
        if "" in finite:  # the only one
            finite = frozenset([spec.components[0].name])
        work = PIECE_BYTES * len(components)
        # Checked indices and packed values must not change, and rows are read twice.
        in_place = await self._compute.run(work, _dense_fields, components)
        opening = self._opener.open(
            incoming, release=gradient.release, on_host=not place.takes_from_anywhere, in_place=in_place
        )
        with components_named(path, components):
            async with opening as tensors:
                opened = await self._compute.run(work, _gradient, spec, components, path, tensors, finite)
                with request_fields(partial(_component_paths, spec, components, path)):
                    return await use(opened)


def _dense_fields(components: Sequence[IncomingComponent]) -> frozenset[str]:
    return frozenset([each.value.field for each in components if each.value is not None and each.is_dense])


def _gradient(
    spec: AccumulatorSpec,
    components: Sequence[IncomingComponent],
    path: str,
    tensors: IncomingTensors,
    finite: frozenset[str],
) -> Gradient:
    values, packed = _values(spec, components, path)
    exclusive = tensors.exclusive
    memory = tensors.memory if exclusive else ()
    return Gradient(
        values, exclusive, memory, live=tensors.is_live, finite=finite, lenders=tensors.lenders, packed=packed
    )


def _component_paths(spec: AccumulatorSpec, components: Sequence[IncomingComponent], path: str) -> Mapping[str, str]:
    """Returns the path in the request for each component of `spec`."""
    if len(spec.components) == 1:
        return {spec.components[0].field: f"{path}[0]"}
    fields = {component.name: component.field for component in spec.components}
    return {fields[given.name]: f"{path}[{index}]" for index, given in enumerate(components)}


def _values(
    spec: AccumulatorSpec, components: Sequence[IncomingComponent], path: str
) -> tuple[dict[str, Value], dict[str, Packed]]:
    by_name = spec.by_name
    values: dict[str, Value] = {}
    packed: dict[str, Packed] = {}
    for index, given in enumerate(components):
        name = given.name
        if not name and len(spec.components) == 1:
            name = spec.components[0].name
        if name not in by_name:
            known = listed(sorted(by_name))
            raise InvalidArgumentError(
                f"expected components {known}, got {quoted(name)}",
                field=f"{path}[{index}].name",
                code="GS_SHAPE_MISMATCH",
            )
        if name in values or name in packed:
            raise InvalidArgumentError(
                f"expected every component once, got {name!r} twice",
                field=f"{path}[{index}].name",
                code="GS_SHAPE_MISMATCH",
            )
        value = _value(by_name[name], given, f"{path}[{index}]")
        if isinstance(value, Packed):
            packed[name] = value
        else:
            values[name] = value
    if len(values) + len(packed) < len(by_name):
        missing = sorted(by_name.keys() - values.keys() - packed.keys())
        raise InvalidArgumentError(f"expected every component, got none for {listed(missing)}", field=path)
    return values, packed


def _value(component: ComponentSpec, given: IncomingComponent, path: str) -> Value | Packed:
    value, indices = given.value, given.indices
    is_sparse = component.layout is Layout.SPARSE
    if value is None or (indices is not None) is not is_sparse:
        kind = "none" if value is None else "dense" if indices is None else "sparse"
        expected = "sparse" if is_sparse else "dense"
        raise InvalidArgumentError(
            f"expected a {expected} value for component {component.name!r}, got {kind}", field=path
        )
    if given.codec is not None:
        return _packed(component, value, given.codec)
    if indices is None:
        if value.fault is not None:
            raise value.error(value.fault)
        check_values_dtype(component, value)
        dense: Array = value.array
        return dense
    rows, values = indices.read(), value.read()
    _check_dtype(indices, _INDEX_DTYPES)
    check_values_dtype(component, value)
    return SparseSlices(rows.astype(np.int64, copy=False), values, given.dense_shape)


def _packed(component: ComponentSpec, tensor: IncomingTensor, codec: Codec) -> Packed:
    data = tensor.read()
    _check_dtype(tensor, (np.dtype(np.uint8),))
    if data.ndim != 1:
        raise InvalidArgumentError(
            f"expected one dimension, got shape {list(data.shape)}", field=f"{tensor.field}.shape"
        )
    if data.ctypes.data % _ALIGNMENT:  # inline contents lie anywhere in their message
        data = data.copy()
    return Packed(codec, data, component.shape.dims or ())


_ALIGNMENT = 4
_INDEX_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))


def check_values_dtype(component: ComponentSpec, tensor: IncomingTensor) -> None:
    """Checks the dtype of values that are open: those of a stored tensor may be converted, others are the component's.

    Raises:
        InvalidArgumentError: They have another dtype.
    """
    if not tensor.is_stored:
        _check_dtype(tensor, (component.dtype,))
    elif tensor.array.dtype.kind == "c":
        raise InvalidArgumentError(
            f"expected {component.dtype} or another real dtype, got {tensor.array.dtype}", field=f"{tensor.field}.dtype"
        )


def _check_dtype(tensor: IncomingTensor, expected: tuple[np.dtype[np.generic], ...]) -> None:
    if tensor.array.dtype not in expected:
        raise InvalidArgumentError(
            f"expected dtype {' or '.join(map(str, expected))}, got {tensor.array.dtype}", field=f"{tensor.field}.dtype"
        )
