"""Adds component names to errors, because indices in a request say little about a model of a hundred components."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gradserve_server.errors import ServiceError


class Named(Protocol):
    """A component of a request. Its name may be empty."""

    @property
    def name(self) -> str:
        """The name of the component."""
        ...


@contextmanager
def components_named(field: str, components: Sequence[Named]) -> Iterator[None]:
    """Puts the component's name, if it has one, at the beginning of the message of an error about it.

    Args:
        field: The path of the components in the request.
        components: The components in that field.
    """
    try:
        yield
    except ServiceError as error:
        place = re.match(rf"{re.escape(field)}\[(\d+)\]", error.field or "")
        name = components[int(place[1])].name if place else ""
        if name and repr(name) not in error.message:
            error.message = f"component {name!r}: {error.message}"
        raise
