"""Pytrees as arrays by name, and back: what is sent of them, and how a version gets into them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from gradserve.parameter_records import check_version
from gradserve_protocol.errors import InvalidArgumentError

PyTree: TypeAlias = Any
_ALONE = "value"


def place_of(array: Any) -> Any:
    """Returns the devices of an array, for `jax.device_put`; None if it is not committed to them.

    JAX moves arrays that are not committed to where others are that they are used with.
    """
    return array.sharding if array.committed else None


def leaves_of(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a pytree by name, as `Client.parameters` and updates take them.

    Plain trees of dicts, lists and tuples can be passed as they are; this is for pytrees of any class, as those of Flax
    and Equinox. A leaf is named by the path to it: "layers/0/w"; a leaf that is the whole tree is named "value".

    Args:
        tree: The parameters, or their gradients: a pytree of floating-point arrays.

    Returns:
        The leaves, in the order of the tree.

    Raises:
        InvalidArgumentError: Two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = "/".join(map(_key, path)) or _ALONE
        if name in leaves:
            raise InvalidArgumentError(
                f"expected leaves with distinct names, got two named {name!r}; rename a key that contains '/'"
            )
        leaves[name] = leaf
    return leaves


def to_host(leaves: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns leaves as arrays in the memory of the host, without a copy of what is there already.

    Keys of random numbers become the integers that they consist of.

    Raises:
        InvalidArgumentError: A leaf is neither an array nor a number.
    """
    return {name: _on_host(name, leaf) for name, leaf in leaves.items()}


def from_host(tree: PyTree, arrays: Mapping[str, NDArray[Any]], missing: str) -> PyTree:
    """Returns a pytree with the structure, the dtypes and the places of `tree`, and the values of `arrays`.

    Args:
        tree: The pytree.
        arrays: Values by the names of the leaves, all of them, and others that are not read.
        missing: What an error says about a value that is not there, or has another shape or a wider dtype.

    Raises:
        InvalidArgumentError: A value is missing, or has another shape, or would be rounded.
    """
    leaves = leaves_of(tree)
    made: Sequence[Any] = [_like(name, leaf, arrays, missing) for name, leaf in leaves.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), made)


def placed_like(leaf: Any, value: NDArray[Any]) -> Any:
    """Returns a value with the type, the dtype and the place of a leaf."""
    if _is_random_key(leaf):
        key = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, place_of(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(value.astype(leaf.dtype), place_of(leaf))
    return value.astype(leaf.dtype) if isinstance(leaf, np.ndarray | np.generic) else type(leaf)(value)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_random_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_host(name: str, leaf: Any) -> NDArray[Any]:
    array = np.asarray(jax.random.key_data(leaf) if _is_random_key(leaf) else leaf)
    if array.dtype.kind in "OSU":
        raise InvalidArgumentError(
            f"expected arrays and numbers as leaves, got {type(leaf).__name__} for {name!r}; keep it out of the tree"
        )
    return array


def _like(name: str, leaf: Any, arrays: Mapping[str, NDArray[Any]], missing: str) -> Any:
    expected = np.shape(jax.random.key_data(leaf) if _is_random_key(leaf) else leaf)
    if name not in arrays or arrays[name].shape != expected:
        given = f"shape {arrays[name].shape}" if name in arrays else "none"
        raise InvalidArgumentError(f"expected {name!r} of shape {expected}, got {given}: {missing}")
    value = arrays[name]
    if isinstance(leaf, jax.Array) and not _is_random_key(leaf) and not np.can_cast(value.dtype, leaf.dtype, "safe"):
        raise InvalidArgumentError(
            f"expected {name!r} of dtype {leaf.dtype}, got {value.dtype}, whose values it does not have: {missing}"
        )
    return placed_like(leaf, value)


def load_version(params: PyTree, version: Mapping[str, NDArray[Any]]) -> PyTree:
    """Returns a version as a pytree.

    Args:
        params: A pytree of the structure to return, such as the initial parameters; its values are not read.
        version: The version, or any mapping from names to arrays, such as what `load_parameters` returns.

    Returns:
        A pytree with the structure, the dtypes and the devices of `params`, and the values of the version, which are
        rounded if these dtypes are shorter.

    Raises:
        InvalidArgumentError: The version has other names or shapes than the pytree.
    """
    leaves = leaves_of(params)
    check_version(version, {name: np.shape(leaf) for name, leaf in leaves.items()}, needed=leaves)
    loaded = [placed_like(leaf, version[name]) for name, leaf in leaves.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(params), loaded)


def delta_of(params: PyTree, version: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Returns parameters minus the version that was loaded: an update, where update is "delta".

    Args:
        params: The parameters, which were trained since `load_version` returned them.
        version: The version.

    Returns:
        New arrays by name, with the dtypes and on the devices of the leaves. Differences are from the values that
        `load_version` returned, which are rounded if these dtypes are shorter than those of the version.

    Raises:
        InvalidArgumentError: The version has other names or shapes than the pytree.
    """
    loaded = leaves_of(load_version(params, version))
    return {name: leaf - loaded[name] for name, leaf in leaves_of(params).items()}
