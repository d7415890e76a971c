"""The check of a version before a framework loads it into a model."""

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.printing import first_items

_FIELD = "version"


def check_version(
    version: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    needed: Iterable[str],
    also_known: Iterable[str] = (),
) -> None:
    """Checks that a version has the values that a model needs, of the model's shapes, and no others.

    Args:
        version: The version, or any mapping from names to arrays.
        shapes: The shapes of the model's parameters, by name.
        needed: The names of those that must be in the version.
        also_known: Further names that may be in it.

    Raises:
        InvalidArgumentError: It has other names or shapes.
    """
    known = {*shapes, *also_known}
    missing = [name for name in needed if name not in version]
    unknown = [name for name in version if name not in known]
    if missing or unknown:
        expected = f"values of {_names(missing)}" if missing else "values of the model's parameters alone"
        got = f"{'none, but ' if missing else ''}{_names(unknown)}" if unknown else "none"
        raise InvalidArgumentError(f"expected {expected}, got {got}: the version is of another model", field=_FIELD)
    for name, shape in shapes.items():
        got_shape = tuple(version[name].shape) if name in version else shape
        if got_shape != shape:
            raise InvalidArgumentError(
                f"expected shape {shape} of {name!r}, got {got_shape}: the version is of another model",
                field=_FIELD,
            )


def _names(names: list[str]) -> str:
    return first_items(map(repr, names), len(names))
