"""The fields of errors about parameters, as a program knows them: arguments and components, not fields of messages."""

import re
from collections.abc import Callable, Iterable

from gradserve_protocol.errors import GradserveError

_GROUPS = frozenset({"spec", "rounds", "lifetime", "parameters", "fork"})
"""Messages whose fields are arguments of their own."""
_ARGUMENTS = {
    "accept_non_finite": "refuse_non_finite",
    "adaptive_grace": "grace",
    "components": "values",
    "expected_alive": "expected",
    "expected_count": "expected",
    "fork": "shared_name",
    "many_per_worker": "one_per_worker",
    "name": "shared_name",
    "normalization": "normalize",
    "parameters": "shared_name",
    "spec": "shared_name",  # it is taken by parameters with other properties
    "state": "values",
}
"""The arguments whose fields have other names."""
_ENTRY = re.compile(r"(\w+)\[(\d+)\]")


class fields_named:  # noqa: N801
    """Makes the field of a block's error name the argument, and the component by its name: "update['w']"."""

    def __init__(self, components: Callable[[], Iterable[str]] = tuple, **arguments: str) -> None:
        """Takes the names of the components in the order of the request, and other names of arguments.

        Args:
            components: Returns the names; called after an error only.
            arguments: Names for arguments that the call takes as something else: values="path".
        """
        self._components = components
        self._arguments = arguments

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Changes the field of an error."""
        if isinstance(error, GradserveError) and error.field and not error.field.endswith("incarnation"):
            error.field = self._argument(error.field)

    def _argument(self, field: str) -> str:
        parts = field.split(".")
        while len(parts) > 1 and parts[0] in _GROUPS:
            del parts[0]
        if parts[:2] == ["staleness", "max"]:
            return "max_staleness"
        entry = _ENTRY.fullmatch(parts[0])
        name = parts[0] if entry is None else entry[1]
        argument = _ARGUMENTS.get(name, name)
        if (renamed := self._arguments.get(argument)) is not None:
            return renamed
        if entry is None:
            return argument
        component = dict(enumerate(self._components())).get(int(entry[2]))
        return f"{argument}[{component!r}]" if component else argument
