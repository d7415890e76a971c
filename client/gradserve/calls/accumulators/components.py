"""The components of an accumulator, trees of them, and their values in requests and replies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from gradserve.calls.exchange import Operation, Progress, Reply
from gradserve.calls.tensors import receive_results
from gradserve.conversion.arrays import as_array, as_dtype
from gradserve.conversion.plain import as_choice, as_handle, as_shape
from gradserve.conversion.tensors import as_array_of, as_slices, as_tensor_of
from gradserve.conversion.trees import Structure, Tree, leaves_of, taken_apart
from gradserve.results import DenseSpec, IndexedSlices, SparseSpec, TensorHandle, Value
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray, Array, DType
from gradserve_protocol.codecs import CODECS_BY_NUMBER, Codec
from gradserve_protocol.errors import InternalError, InvalidArgumentError
from gradserve_protocol.gpu import GpuArray
from gradserve_protocol.messages import encode_codec
from gradserve_protocol.printing import first_items
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

ComponentSpec: TypeAlias = DenseSpec | SparseSpec


@dataclass(frozen=True, eq=False)
class PackedArray:
    """An array as a codec has packed it.

    Attributes:
        codec: The codec.
        data: The bytes, uint8.
    """

    codec: Codec
    data: Array


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """The rows of an array for each server, packed.

    Attributes:
        shape: The shape of the array.
        pieces: The packed rows by server.
    """

    shape: tuple[int, ...]
    pieces: Mapping[int, PackedArray]


Sent: TypeAlias = Value | GpuArray | TensorHandle | PackedArray | PackedPieces
"""A gradient of a component, as it is sent."""
Missing: TypeAlias = Literal["error", "zeros", "skip"]
"""The treatment of a component without a gradient: an error, zeros, or no value at all."""
ONLY = ""
"""The name of the component of an accumulator of one tensor."""
_INT64 = np.dtype(np.int64)
_NOTHING = np.empty(0)


@dataclass(frozen=True)
class Component:
    """A component of an accumulator: one of its tensors.

    Attributes:
        name: Its name; ONLY in an accumulator of one tensor.
        dtype: The dtype of its gradients.
        shape: Its shape, with -1 for an unknown dimension; None if it is not known at all.
        is_sparse: Whether its gradients are IndexedSlices.
        given_as: The argument in which its gradients are given, and how messages call them.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    is_sparse: bool
    given_as: str = "gradient"

    @property
    def title(self) -> str:
        """The component, as error messages call it."""
        return f"component {self.name!r}" if self.name else f"the {self.given_as}"

    def __str__(self) -> str:
        sizes = "of any shape" if self.shape is None else str(self.shape).replace("-1", "?")
        return " ".join([*filter(None, (self.name, "sparse" if self.is_sparse else "")), str(self.dtype), sizes])

    def value(self, value: Any) -> Sent:
        """Converts a gradient to what is sent.

        Raises:
            InvalidArgumentError: It is not a gradient, or a value does not fit into the dtype.
        """
        argument = self._argument
        slices = as_slices(value)
        if self.is_sparse:
            if slices is None:
                raise argument.error("IndexedSlices", value)
            return self._slices(slices)
        if slices is not None:
            raise argument.error_saying("an array or numbers", "rows, which a SparseSpec takes")
        if isinstance(value, TensorHandle):
            return as_handle(value, argument)
        return as_tensor_of(self.dtype, value, argument)

    def zeros(self) -> Value:
        """Returns a gradient of zeros; a sparse one has no rows.

        Raises:
            InvalidArgumentError: The shape is not known.
        """
        sizes = self.shape[1:] if self.shape is not None and self.is_sparse else self.shape
        if sizes is None or -1 in sizes:
            raise InvalidArgumentError(
                f"expected a gradient of {self.title}, got none; zeros cannot replace it, as its shape is not known",
                field=self.given_as,
            )
        if self.is_sparse:
            return IndexedSlices(np.zeros((0, *sizes), self.dtype), np.zeros(0, np.int64))
        return np.zeros(sizes, self.dtype)

    def missing(self, got: str | None) -> InvalidArgumentError:
        """Returns the error of a missing gradient."""
        return InvalidArgumentError(
            f"expected a gradient of {self.title}, got {got}; pass zeros for a parameter without a gradient, or make "
            "the accumulator with missing='zeros'",
            field=self.given_as,
        )

    @cached_property
    def _argument(self) -> Argument:
        return Argument(self.title, self.given_as)

    def _slices(self, slices: IndexedSlices) -> IndexedSlices:
        values = as_array_of(self.dtype, slices.values, Argument(f"the values of {self.title}", self.given_as))
        where = Argument(f"the indices of {self.title}", f"{self.given_as}.indices")
        indices = as_array(slices.indices, where)
        if indices.size and indices.dtype.kind not in "iu":
            raise where.error_saying("integers", f"an array of {indices.dtype}")
        shape = slices.dense_shape
        if shape is not None:
            shape = as_shape(shape, Argument(f"the dense_shape of {self.title}", f"{self.given_as}.dense_shape"))
        return IndexedSlices(values, as_array_of(_INT64, indices, where), shape)


class Components:
    """All components of an accumulator or of parameters, and the tree they form."""

    def __init__(
        self,
        components: Mapping[str, Component],
        structure: Structure,
        missing: Missing = "error",
        given_as: str = "gradient",
    ) -> None:
        self._components = components
        self._structure = structure
        self._missing = missing
        self._gradient = Argument(f"the {given_as}", given_as)

    @classmethod
    def of_one_tensor(cls, spec: ComponentSpec) -> Self:
        """Returns the one nameless component of an accumulator of one tensor."""
        component = _component(ONLY, spec, dtype=Argument("dtype"), shape=Argument("shape"))
        leaves, structure = taken_apart({ONLY: component}, Argument("dtype"))
        return cls(leaves, structure)

    @classmethod
    def of_tree(cls, tree: Tree, missing: Missing) -> Self:
        """Returns a component for each leaf of a tree.

        Args:
            tree: A tree whose leaves are specs, or objects with the dtype and shape of gradients.
            missing: The treatment of a missing gradient: an error, or zeros.

        Raises:
            InvalidArgumentError: It is not such a tree.
        """
        treatment: Any = as_choice(missing, ("error", "zeros"), Argument("missing"))
        leaves, structure = taken_apart(tree, Argument("components"))
        return cls({name: component_like(name, leaf) for name, leaf in leaves.items()}, structure, treatment)

    def __iter__(self) -> Iterator[Component]:
        return iter(self._components.values())

    def __str__(self) -> str:
        return first_items(map(str, self), len(self._components))

    def gradient(self, tree: Tree) -> dict[str, Sent]:
        """Converts a gradient to what is sent for each component that it has.

        Raises:
            InvalidArgumentError: A component is missing, unknown, or cannot be sent.
        """
        # Most gradients are arrays by name that need no conversion: with many components, this takes half of the time.
        is_by_name = type(tree) is dict and tree.keys() == self._components.keys()
        leaves = tree if is_by_name else leaves_of(tree, self._components.keys(), self._gradient)
        values: dict[str, Sent] = {}
        for name, component in self._components.items():
            value = leaves.get(name)
            if (
                type(value) is np.ndarray
                and value.dtype == component.dtype
                and value.flags.c_contiguous
                and not component.is_sparse
            ):
                values[name] = value
            elif value is not None or not (name or self._missing == "skip"):
                values[name] = component.value(value)
            elif self._missing == "zeros":
                values[name] = component.zeros()
            elif self._missing == "error":
                raise component.missing(None if name in leaves else "none")
        return values

    def average(self, values: Mapping[str, Value]) -> tuple[dict[str, Value], Tree]:
        """Returns an average by component, in the order of the components, and as their tree."""
        ordered = {name: values[name] for name in self._components}
        return ordered, self._structure.filled(ordered)


def component_like(name: str, leaf: Any, field: str = "components") -> Component:
    """Returns the component for a leaf of the tree that an accumulator is made of, which is the argument `field`."""
    title = f"component {name!r}" if name else field
    argument = Argument(title, field)
    if isinstance(leaf, DenseSpec | SparseSpec):
        spec: ComponentSpec = leaf
    elif (slices := as_slices(leaf)) is not None:
        spec = SparseSpec(as_array(slices.values, argument).dtype, slices.dense_shape)
    elif not isinstance(leaf, np.ma.MaskedArray) and hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        # Also leaves without values: jax.ShapeDtypeStruct, tf.TensorSpec, a tensor of a GPU.
        spec = DenseSpec(leaf.dtype, leaf.shape)
    else:
        array = as_array(leaf, argument)
        spec = DenseSpec(array.dtype, array.shape)
    return _component(
        name, spec, dtype=Argument(f"the dtype of {title}", "dtype"), shape=Argument(f"the shape of {title}", "shape")
    )


def _component(name: str, spec: ComponentSpec, *, dtype: Argument, shape: Argument) -> Component:
    return Component(
        name,
        as_dtype(spec.dtype, dtype),
        None if spec.shape is None else as_shape(spec.shape, shape),
        isinstance(spec, SparseSpec),
    )


def arrays_of(values: Mapping[str, Sent]) -> tuple[list[AnyArray], bool]:
    """Returns the arrays of a gradient, in the order in which `add_values` takes their messages.

    Also returns whether it has handles.
    """
    arrays: list[AnyArray] = []
    has_handles = False
    for value in values.values():
        if isinstance(value, np.ndarray | GpuArray):
            arrays.append(value)
        elif isinstance(value, IndexedSlices):
            arrays += [value.indices, value.values]
        elif isinstance(value, PackedArray):
            arrays.append(value.data)
        elif isinstance(value, PackedPieces):
            arrays += [each.data for each in value.pieces.values()]
        else:
            has_handles = True
    return arrays, has_handles


def without_arrays(values: Mapping[str, Sent]) -> dict[str, Sent]:
    """Returns what `add_values` needs of a gradient beside the messages of its arrays."""
    return {
        name: value
        if isinstance(value, TensorHandle)
        else IndexedSlices(_NOTHING, _NOTHING, value.dense_shape)
        if isinstance(value, IndexedSlices)
        else PackedArray(value.codec, _NOTHING)
        if isinstance(value, PackedArray)
        else _NOTHING
        for name, value in values.items()
    }


def add_values(field: Any, values: Mapping[str, Sent], tensors: Sequence[tensor_pb2.Tensor]) -> None:
    """Adds values of components to a repeated field of a request, with the messages of their arrays."""
    supply = iter(tensors)
    for name, value in values.items():
        part = field.add(name=name)
        if isinstance(value, np.ndarray | GpuArray):
            part.dense.CopyFrom(next(supply))
        elif isinstance(value, IndexedSlices):
            part.sparse.indices.CopyFrom(next(supply))
            part.sparse.values.CopyFrom(next(supply))
            if value.dense_shape is not None:
                part.sparse.dense_shape.dims.extend(value.dense_shape)
                part.sparse.dense_shape.SetInParent()
        elif isinstance(value, PackedArray):
            part.packed.codec = encode_codec(value.codec)
            part.packed.data.CopyFrom(next(supply))
        else:
            assert isinstance(value, TensorHandle), "pieces go to their servers one by one"
            part.dense.handle = value.handle


def receive_values(
    reply: Reply,
    parts: Sequence[accumulator_pb2.ComponentGradient],
    progress: Progress | None,
    *,
    in_place: bool,
) -> Operation[dict[str, Any]]:
    """Returns the components in a reply, by name; read-only ones if they may be memory of the server.

    Those that were asked for with a codec are packed.
    """
    tensors: list[tensor_pb2.Tensor] = []
    for part in parts:
        if part.HasField("sparse"):
            tensors += [part.sparse.indices, part.sparse.values]
        else:
            tensors.append(part.packed.data if part.HasField("packed") else part.dense)
    received = yield from receive_results(reply, tensors, progress)
    if in_place:
        # Whichever way they came, so that programs do not depend on it.
        for array in received:
            array.flags.writeable = False
    arrays = iter(received)
    components: dict[str, Any] = {}
    for part in parts:
        if part.HasField("sparse"):
            indices = next(arrays)
            components[part.name] = IndexedSlices(next(arrays), indices, tuple(part.sparse.dense_shape.dims))
        elif part.HasField("packed"):
            codec = CODECS_BY_NUMBER.get(part.packed.codec)
            if codec is None:
                raise InternalError(f"the server sent component {part.name!r} with unknown codec {part.packed.codec}")
            components[part.name] = PackedArray(codec, next(arrays))
        else:
            components[part.name] = next(arrays)
    return components
