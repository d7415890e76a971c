"""An exception of a signal's handler, raised while a value is converted, comes out as it is."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gradserve.conversion.arrays import as_array
from gradserve.conversion.plain import as_integer, as_list, as_number
from gradserve_protocol.argument import Argument

ARGUMENT = Argument("x")


class HandlerError(Exception):
    """What the handler raises."""


class Slow:
    """A value whose conversion takes so long that a signal comes in between."""

    def _wait(self) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        while True:
            pass

    __index__ = __float__ = __iter__ = _wait

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._wait()  # type: ignore[no-any-return]


def function(_number: int, _frame: object) -> None:
    raise HandlerError


class Handler:
    def __call__(self, _number: int, _frame: object) -> None:
        raise HandlerError

    def method(self, _number: int, _frame: object) -> None:
        raise HandlerError


HANDLERS: dict[str, Any] = {
    "function": function,
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(function),
}


@pytest.fixture(params=HANDLERS)
def _handler(request: pytest.FixtureRequest) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread")
    before = signal.signal(signal.SIGUSR2, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("convert", [as_integer, as_number, as_array])
def test_it_comes_out(convert: Callable[..., Any]) -> None:
    with pytest.raises(HandlerError):
        convert(Slow(), ARGUMENT)


@pytest.mark.usefixtures("_handler")
def test_out_of_a_list_too() -> None:
    with pytest.raises(HandlerError):
        as_list(Slow(), "a list", ARGUMENT)
