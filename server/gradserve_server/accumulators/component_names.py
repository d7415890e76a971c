"""Names components in errors: their place in a request says little to whoever has a model of a hundred."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gradserve_server.errors import ServiceError


class Named(Protocol):
    """A component of a request; its name may be empty."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...


@contextmanager
def components_named(field: str, components: Sequence[Named]) -> Iterator[None]:
    """Begins the message of an error about a component with its name, where it has one.

    Args:
        field: The path of the components in the request.
        components: The elements of that field.
    """
    try:
        yield
    except ServiceError as error:
        place = re.match(rf"{re.escape(field)}\[(\d+)\]", error.field or "")
        name = components[int(place[1])].name if place else ""
        if name and repr(name) not in error.message:
            error.message = f"component {name!r}: {error.message}"
        raise
