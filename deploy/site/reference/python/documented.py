"""The public names of the client, with their kinds and docstrings."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Documented:
    """A public class, function, value or type, or a member of a class.

    Attributes:
        module: The module from which users import it, such as "gradserve.aio".
        name: Its name there: "connect", "Client", "Client.put".
        kind: "class", "function", "property" or "value".
        source: The module that defines it.
        signature: How it is called, or its value; "" for what users do not call.
        docstring: Its docstring, without indentation.
        members: The members of a class.
    """

    module: str
    name: str
    kind: str
    source: str
    signature: str
    docstring: str
    members: tuple["Documented", ...] = ()

    @property
    def anchor(self) -> str:
        """The anchor on its page, such as "gradserve.aio.Client.put"."""
        return f"{self.module}.{self.name.replace('__', '')}"

    @property
    def short_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, in one line."""
        return " ".join(self.docstring.partition("\n\n")[0].split())

    def everything(self) -> Iterator["Documented"]:
        """Yields it and all its members."""
        yield self
        for member in self.members:
            yield from member.everything()
