"""The components of parameters, the tree that they form, and the values that their creator gives them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from gradserve.calls.accumulators.components import Component, Components, Sent, component_like
from gradserve.calls.parameters.compression import PackedUpdate
from gradserve.conversion.tensors import as_slices
from gradserve.conversion.trees import Structure, Tree, leaves_of, taken_apart
from gradserve.parameter_records import Version
from gradserve.results import DenseSpec, SparseSpec, TensorHandle, Value
from gradserve.saved.parameters import SavedParameters
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import BFLOAT16, AnyArray, host_array
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.printing import first_items
from gradserve_protocol.v1 import parameters_pb2

_FIELD = "values"
_UPDATE = "update"
_VALUES = Argument(_FIELD)
_FLOATS = frozenset({np.dtype("<f2"), BFLOAT16, np.dtype("<f4"), np.dtype("<f8")})
_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__")


class ParameterComponents(Components):
    """The components of parameters, and the tree that they form.

    A tensor of PyTorch that the tree has under several names is one component, under the first of them.

    Attributes:
        names: All names of the tree, in its order.
    """

    def __init__(
        self, components: Mapping[str, Component], structure: Structure, names: Sequence[str], tied: Mapping[str, str]
    ) -> None:
        super().__init__(components, structure, "skip", _UPDATE)
        self.names = names
        self._tied = tied

    def gradient(self, tree: Tree) -> dict[str, Sent]:
        """Converts an update to what is sent for each component that it has; a packed one is that already.

        Raises:
            InvalidArgumentError: It has no component, an unknown one, one that cannot be sent, or two values for one.
        """
        if isinstance(tree, PackedUpdate):
            return tree.values
        values = super().gradient(self._untied(tree) if self._tied else tree)
        if not values:
            raise InvalidArgumentError("expected an update of at least one component, got none", field=_UPDATE)
        return values

    def average(self, values: Mapping[str, Value]) -> tuple[dict[str, Value], Tree]:
        """Returns the values of a version by name, and as their tree."""
        whole = {name: values[self._tied.get(name, name)] for name in self.names}
        return whole, self._structure.filled(whole)

    def _untied(self, tree: Tree) -> dict[str, Any]:
        leaves = dict(leaves_of(tree, self.names, self._gradient))
        for name, first in self._tied.items():
            value = leaves.pop(name, None)
            if value is None:
                continue
            if leaves.get(first) is None:
                leaves[first] = value
            elif not _are_equal(self._components[first], leaves[first], value):
                raise InvalidArgumentError(
                    f"expected the same update of {name!r} and {first!r}, which are one tensor, got two", field=_UPDATE
                )
        return leaves


class Model(NamedTuple):
    """Parameters as a program gives them: their components, and their values unless it only has shapes.

    Attributes:
        components: The components.
        values: What is sent for each component; None for shapes alone.
        saved: The file or the version that the values are of.
    """

    components: ParameterComponents
    values: dict[str, Sent] | None
    saved: SavedParameters | None = None


def model_of(tree: Tree) -> Model:
    """Returns the components and the values of a tree.

    Args:
        tree: A tree of arrays, or of shapes; saved parameters; a version.

    Raises:
        InvalidArgumentError: A leaf is neither, has no fixed shape, or no floating-point numbers; or there are none.
    """
    saved = tree if isinstance(tree, SavedParameters) else None
    if isinstance(tree, Version):
        saved = SavedParameters(tree.components, tree.step, tree.digest, None, None)
        tree = tree.tree
    elif saved is not None:
        tree = dict(saved)
    leaves, structure = taken_apart(tree, _VALUES)
    if not leaves:
        raise _VALUES.error_saying("at least one array or shape", "none")
    tied = _tied(leaves, is_version=saved is not None)
    components = {name: _component(name, leaf) for name, leaf in leaves.items() if name not in tied}
    without = [name for name in components if not _has_values(leaves[name])]
    values: dict[str, Sent] | None = None
    if not without:
        values = {
            name: replace(component, given_as=_FIELD).value(leaves[name]) for name, component in components.items()
        }
    elif len(without) < len(components):
        raise _VALUES.error_saying(
            "values of all components, or shapes alone", f"no values of {first_items(map(repr, without), len(without))}"
        )
    return Model(ParameterComponents(components, structure, tuple(leaves), tied), values, saved)


def check_saved(
    saved: SavedParameters,
    spec: parameters_pb2.ParametersSpec,
    components: Iterable[Component],
    *,
    with_state: bool,
) -> None:
    """Checks that parameters in a file have the names, then the shapes, then the dtypes of other parameters.

    With the state of the optimizer, that has to be the same kind of optimizer.

    Raises:
        InvalidArgumentError: They do not.
    """
    expected = {each.name: each for each in components}
    missing = [name for name in expected if name not in saved]
    unknown = [name for name in saved if name not in expected]
    if missing or unknown:
        parts = [
            f"{what} {first_items(map(repr, names), len(names))}"
            for what, names in (("no", missing), ("also", unknown))
            if names
        ]
        raise _of_file(f"expected components {first_items(map(repr, expected), len(expected))}", " and ".join(parts))
    for name, component in expected.items():
        if saved[name].shape != component.shape:
            raise _of_file(f"expected shape {component.shape} of component {name!r}", f"{saved[name].shape}")
    for name, component in expected.items():
        if saved[name].dtype != component.dtype:
            raise _of_file(f"expected {component.dtype} for component {name!r}", f"{saved[name].dtype}")
    if with_state and saved.state is not None:
        ours, theirs = spec.optimizer.WhichOneof("kind"), saved.state.optimizer.WhichOneof("kind")
        if ours != theirs:
            raise _of_file(
                f"expected the state of optimizer {ours}", f"that of {theirs}; optimizer=False loads the values alone"
            )


def _of_file(expected: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{expected}, got {got} in the file", field="path")


def _component(name: str, leaf: Any) -> Component:
    title = f"component {name!r}" if name else _FIELD
    argument = Argument(title, _FIELD)
    if isinstance(leaf, SparseSpec) or as_slices(leaf) is not None:
        raise argument.error_saying("a dense array or shape", "rows")
    component = replace(component_like(name, leaf, _FIELD), given_as=_UPDATE)
    if component.dtype not in _FLOATS:
        raise argument.error_saying(
            "float16, bfloat16, float32 or float64",
            f"{component.dtype}; buffers and counters are not parameters: leave them out, as "
            "dict(model.named_parameters()) does",
        )
    if component.shape is None or -1 in component.shape:
        raise argument.error_saying("a shape with known sizes", str(leaf))
    return component


def _has_values(leaf: Any) -> bool:
    """Returns False for shapes: DenseSpec, jax.ShapeDtypeStruct, tf.TensorSpec, tensors on PyTorch's device "meta"."""
    if isinstance(leaf, DenseSpec) or getattr(leaf, "is_meta", False) is True:
        return False
    if isinstance(leaf, TensorHandle) or not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return True
    return any(hasattr(leaf, protocol) for protocol in _ARRAY_PROTOCOLS)


def _tied(leaves: Mapping[str, Any], *, is_version: bool) -> dict[str, str]:
    """Returns the names of tensors that came before under other names, with the first of these.

    Only PyTorch's and those of versions: there, two names of one memory are one parameter. Elsewhere, the same zeros
    may stand for two.
    """
    firsts: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, leaf in leaves.items():
        key: Any
        if is_version:
            key = id(leaf)
        elif hasattr(leaf, "data_ptr") and leaf.data_ptr():
            key = leaf.data_ptr(), tuple(leaf.shape), tuple(leaf.stride()), str(leaf.dtype), str(leaf.device)
        else:
            continue
        first = firsts.setdefault(key, name)
        if first != name:
            tied[name] = first
    return tied


def _are_equal(component: Component, one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, TensorHandle) or isinstance(other, TensorHandle):
        return bool(one == other)
    first, second = (host_array(cast("AnyArray", component.value(each))) for each in (one, other))
    return np.array_equal(first, second, equal_nan=True)
