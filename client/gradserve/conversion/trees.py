"""Trees: nested dicts, lists, tuples and named tuples with values as leaves, like JAX's pytrees.

A leaf is named by the path to it: "layers/0/w". None is a tree without leaves.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from gradserve.conversion.plain import is_text
from gradserve_protocol.argument import Argument

Tree: TypeAlias = Any
"""A value; a dict, list, tuple or named tuple of trees; or None."""

_SEPARATOR = "/"
_MAX_LEVELS = 64
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Structure:
    """A tree with the names of its leaves in the place of their values."""

    _named: Tree

    def filled(self, values: Mapping[str, Any]) -> Tree:
        """Returns a tree of this structure with the values of these names."""
        return _filled(self._named, values)


def taken_apart(tree: Tree, argument: Argument) -> tuple[dict[str, Any], Structure]:
    """Returns the leaves of a tree by name, in their order, and its structure.

    A list or tuple of numbers, or of such lists, is a leaf.

    Raises:
        InvalidArgumentError: Two leaves have the same name, a key is neither text nor an integer, or the tree is too
            deep.
    """
    leaves: dict[str, Any] = {}

    def named(node: Tree, path: tuple[str, ...]) -> Tree:
        if node is None:
            return None
        children = None if _is_numbers(node, len(path)) else _children(node, path, argument)
        if children is None:
            return _add(leaves, path, node, argument)
        return _like(node, [named(child, (*path, key)) for key, child in children])

    return leaves, Structure(named(tree, ()))


def leaves_of(tree: Tree, names: Collection[str], argument: Argument) -> Mapping[str, Any]:
    """Returns the leaves of a tree by name, except missing ones.

    Args:
        tree: The tree, or a dict of leaves by name.
        names: The names of the leaves.
        argument: The argument that it was passed as.

    Raises:
        InvalidArgumentError: A leaf has none of these names.
    """
    known = set(names)
    branches = {"", *(branch for name in known for branch in _branches(name))}
    leaves: dict[str, Any] = {}

    def visit(node: Tree, path: tuple[str, ...]) -> None:
        name = _SEPARATOR.join(path)
        if name in known and (path or not isinstance(node, Mapping)):
            _add(leaves, path, node, argument)
        elif name in branches and isinstance(node, Mapping | list | tuple):
            for key, child in _children(node, path, argument) or ():
                visit(child, (*path, key))
        elif taken_apart(node, argument)[0]:
            raise argument.error_saying(f"components {sorted(known)}", repr(name) if path else type(node).__name__)

    visit(tree, ())
    return leaves


def _add(leaves: dict[str, Any], path: Sequence[str], leaf: Any, argument: Argument) -> str:
    name = _SEPARATOR.join(path)
    if name in leaves:
        raise argument.error_saying("distinct names", f"two values named {name!r}")
    leaves[name] = leaf
    return name


def _branches(name: str) -> Iterable[str]:
    """Returns the names of the nodes on the path to a leaf."""
    return accumulate(name.split(_SEPARATOR)[:-1], lambda way, key: f"{way}{_SEPARATOR}{key}")


def _children(node: Tree, path: Sequence[str], argument: Argument) -> list[tuple[str, Tree]] | None:
    """Returns the children of a node, by key; None for a leaf."""
    if not isinstance(node, Mapping | list | tuple):
        return None
    if len(path) == _MAX_LEVELS:
        raise argument.error_saying(f"a tree of at most {_MAX_LEVELS} levels", "more")
    if isinstance(node, Mapping):
        return [(_key(key, argument), child) for key, child in node.items()]
    keys = getattr(node, "_fields", None) or map(str, range(len(node)))
    return list(zip(keys, node, strict=True))


def _key(key: object, argument: Argument) -> str:
    if is_text(key) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    raise argument.error("names as keys", key)


def _filled(named: Tree, values: Mapping[str, Any]) -> Tree:
    if type(named) is str:
        return values[named]
    if type(named) is dict:
        return {key: values[each] if type(each) is str else _filled(each, values) for key, each in named.items()}
    if named is None:
        return None
    return _like(named, [_filled(each, values) for each in (named.values() if isinstance(named, Mapping) else named)])


def _like(node: Any, children: list[Tree]) -> Tree:
    """Returns a node of the same kind and with the same keys, but other children."""
    if isinstance(node, Mapping):
        return _mapping_like(node, dict(zip(node, children, strict=True)))
    if _is_named_tuple(node):
        return type(node)(*children)
    return tuple(children) if isinstance(node, tuple) else children


def _mapping_like(node: Mapping[Any, Any], children: dict[Any, Tree]) -> Tree:
    if type(node) is dict:
        return children
    if isinstance(node, MutableMapping):  # such as a defaultdict, which cannot be made from its contents alone
        made = copy.copy(node)
        made.update(children)
        return made
    try:
        return type(node)(children)  # type: ignore[call-arg]
    except TypeError:
        return children


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_numbers(value: Any, level: int) -> bool:
    """Returns True if a value is a list or tuple of numbers, or of such lists."""
    if not isinstance(value, list | tuple) or not value or _is_named_tuple(value) or level > _MAX_LEVELS:
        return False
    return all(type(each) in _NUMBERS or _is_numbers(each, level + 1) for each in value)
