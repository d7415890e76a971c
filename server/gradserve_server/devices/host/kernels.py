"""Kernels that may be there or not: they are prepared beside the calls, and some cannot be made on every machine."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

KernelsT = TypeVar("KernelsT")

_log = logging.getLogger(__name__)


class KernelError(Exception):
    """A kernel cannot be made on this machine."""


def prepare_each(
    what: str,
    dtypes: Iterable[np.dtype[Any]],
    compile_kernels: Callable[[np.dtype[Any], Callable[[], bool]], KernelsT | None],
    stop: Callable[[], bool],
) -> Iterator[tuple[np.dtype[Any], KernelsT]]:
    """Yields the kernels for each dtype as they are ready.

    Of a dtype whose kernels cannot be made, one line is logged and nothing is yielded.

    Args:
        what: What the kernels compute, for the log.
        dtypes: In the order in which their kernels are prepared.
        compile_kernels: Compiles those for a dtype; returns nothing once `stop()`. May raise KernelError.
        stop: Whether to end early.
    """
    for dtype in dtypes:
        try:
            kernels = compile_kernels(dtype, stop)
        except KernelError as error:
            _log.warning("no kernels of %s for %s, NumPy computes instead: %s", what, dtype, error)
            continue
        if kernels is None:
            return
        yield dtype, kernels
