"""Puts the names of arguments into the server's errors about request fields."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gradserve.errors import InvalidArgumentError, NotFoundError

_PLACE = re.compile(r"(?:config\.)?((\w+)(?:\[[^\]]*\])?)")
_OF_THE_CALL = frozenset({"layer", "placement", "forward_id", "lease", "request_id"})
"""Fields whose errors need no argument name."""


@contextmanager
def arguments_named(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Adds the argument's name to the message of an error about it, unless the message has it already.

    Args:
        names: The names of arguments that differ from the request's, by the request's field, or by an element such as
            "variables[0]".
    """
    try:
        yield
    except (InvalidArgumentError, NotFoundError) as error:
        place = _PLACE.match(error.field or "")
        if place is not None and place[2] not in _OF_THE_CALL:
            error.message = _with_name(error.message, place[1], place[2], names or {})
        raise


def _with_name(message: str, element: str, field: str, names: Mapping[str, str]) -> str:
    name = names.get(element) or names.get(field)
    if name is not None and _has_word(message, field):
        return re.sub(rf"\b{re.escape(field)}\b", name, message)
    if _has_word(message, name or field):
        return message
    return f"{name or element}: {message}"


def _has_word(message: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", message) is not None
