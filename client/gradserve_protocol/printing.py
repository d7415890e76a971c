"""Texts for people: values in few words, and texts from elsewhere made safe for terminals and logs."""

import dataclasses
import re
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the server's commands print before they need NumPy
    import numpy as np

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python takes for printable although nothing is seen of them."""
T = TypeVar("T")
_MAX_ELEMENTS = 6
_MAX_ITEMS = 6


def visible(text: str) -> str:
    r"""Returns a text in one line that does nothing to a terminal, and in which everything can be seen.

    What is not printable becomes an escape, as in Python: \x1b, \n, \u202e. That is control characters, those that
    change the direction of text, those without a width, and all spaces and line breaks but the ordinary space.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(
        each if each.isprintable() and not _INVISIBLE.match(each) else each.encode("unicode_escape").decode()
        for each in text
    )


def visible_lines(text: str) -> str:
    """Returns a text of several lines, each as `visible` does; all but the first are indented."""
    return "\n  ".join(map(visible, text.split("\n")))


def abbreviated(cls: type[T]) -> type[T]:
    """Gives a dataclass or a named tuple a repr with all its fields, abbreviated."""
    cls.__repr__ = _repr_of_fields  # type: ignore[method-assign]
    return cls


def abbreviate(value: object) -> str:
    """Returns the repr of a value: of a large array its dtype and shape, of a long container its first items."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.dtype):
        return str(value.name)
    if isinstance(value, dict):
        return "{" + first_items((f"{name!r}: {abbreviate(each)}" for name, each in value.items()), len(value)) + "}"
    if type(value) is list:
        return f"[{first_items(map(abbreviate, value), len(value))}]"
    if type(value) is tuple:
        return f"({first_items(map(abbreviate, value), len(value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def first_items(shown: Iterable[str], count: int) -> str:
    """Returns the first of `count` texts on one line, and how many more there are."""
    more = [f"... {count - _MAX_ITEMS} more"] if count > _MAX_ITEMS else []
    return ", ".join([*islice(shown, _MAX_ITEMS), *more])


def _array(array: "np.ndarray[Any, Any]") -> str:
    if array.size > _MAX_ELEMENTS:
        return f"array(dtype={array.dtype}, shape={array.shape})"
    return " ".join(repr(array).split())


def _repr_of_fields(self: Any) -> str:
    if dataclasses.is_dataclass(self):
        names: Iterable[str] = [field.name for field in dataclasses.fields(self) if field.repr]
    else:
        names = self._fields
    fields = {name: getattr(self, name) for name in names}
    return f"{type(self).__name__}({', '.join(f'{name}={abbreviate(value)}' for name, value in fields.items())})"
