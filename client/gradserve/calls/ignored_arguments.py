"""Warnings about arguments that have no effect."""

import inspect
import threading
import warnings
from collections.abc import Iterable

from gradserve.batch_norm_results import IgnoredArgument, IgnoredArgumentWarning

_PACKAGE = __name__.partition(".")[0]


class IgnoredArguments:
    """Warns once about each ignored argument of one layer object. Safe to use from several threads."""

    def __init__(self, layer: str) -> None:
        """Takes the name of the layer."""
        self._layer = layer
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def warn(self, ignored: Iterable[IgnoredArgument]) -> None:
        """Warns about the arguments not warned about before, at the line that called gradserve."""
        for each in ignored:
            with self._lock:
                is_new = each.argument not in self._warned
                self._warned.add(each.argument)
            if is_new:
                warn_of_ignored(each, f"batch normalization layer {self._layer!r}")


def warn_of_ignored(ignored: IgnoredArgument, owner: str) -> None:
    """Warns about an ignored argument of a layer or an op, at the line that called gradserve."""
    warnings.warn(
        f"{ignored.argument} of {owner} has no effect: {ignored.reason}",
        IgnoredArgumentWarning,
        stacklevel=depth_in_package(),
    )


def depth_in_package() -> int:
    """Returns the stacklevel of the innermost frame outside this package, as seen by the caller."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        depth, frame = depth + 1, frame.f_back
    return depth
