"""Adds component names to errors, because indices in a request say little about a model of a hundred components."""

import re
from collections.abc import Sequence
from typing import Protocol

from gradserve_server.errors import ServiceError
from gradserve_server.limits import quoted


class Named(Protocol):
    """A component of a request. Its name may be empty."""

    @property
    def name(self) -> str:
        """The name of the component."""
        ...


class components_named:  # noqa: N801
    """Puts the component's name, if it has one, at the beginning of the message of a block's error about it."""

    __slots__ = ("_components", "_field")

    def __init__(self, field: str, components: Sequence[Named]) -> None:
        """Takes the path of the components in the request, and the components there."""
        self._field = field
        self._components = components

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Changes the message of an error."""
        if not isinstance(error, ServiceError):
            return
        place = re.match(rf"{re.escape(self._field)}\[(\d+)\]", error.field or "")
        name = self._components[int(place[1])].name if place else ""
        if name and quoted(name) not in error.message:
            error.message = f"component {quoted(name)}: {error.message}"
