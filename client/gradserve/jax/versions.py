"""Pytrees whose leaves a server holds as parameters: what is sent of them, and how a version gets into them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from gradserve.jax.leaves import PyTree, named_leaves, placed_like
from gradserve.training.versions import check_version


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
    return named_leaves(tree)


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
    leaves = named_leaves(params)
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
    loaded = named_leaves(load_version(params, version))
    return {name: leaf - loaded[name] for name, leaf in named_leaves(params).items()}
