"""How faults are planted: each changes the real code in one place."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from gradserve_server.storage.store import Change

Fault: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def without(statement: str) -> Fault:
    """Returns a fault: a statement of SQL is left out."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def execute(self: Change, text: str, *values: Any) -> None:
            if not text.startswith(statement):
                real(self, text, *values)

        real = Change.execute
        patch.setattr(Change, "execute", execute)

    return plant
