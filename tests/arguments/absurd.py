"""Values that nobody should pass."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import gradserve


class Hostile:
    """Fails whatever it is asked."""

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("hostile")

    __array__ = __iter__ = __len__ = __getitem__ = __contains__ = _fail
    __bool__ = __index__ = __int__ = __float__ = __complex__ = _fail
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _fail
    __hash__ = _fail
    __repr__ = __str__ = _fail


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: Any = 1.0
    for _ in range(5000):
        value = [value]
    return value


ABSURD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "an integer": lambda: 3,
    "a negative number": lambda: -1,
    "a fraction": lambda: 1.5,
    "2^63": lambda: 2**63,
    "10^400": lambda: 10**400,
    "NaN": lambda: math.nan,
    "a complex number": lambda: 1j,
    "text": lambda: "abc",
    "a digit as text": lambda: "2",
    "text that is none": lambda: "\ud800",
    "a zero as text": lambda: "\0",
    "bytes": lambda: b"\xff",
    "no elements": list,
    "rows of different lengths": lambda: [[1], [1, 2]],
    "None in a list": lambda: [None],
    "a list of numbers": lambda: [1.0, 2.0],
    "a dict": lambda: {"a": None},
    "a dict by number": lambda: {0: 1.0},
    "a dict by None": lambda: {None: "x"},
    "a set": lambda: {1},
    "an object": object,
    "a type": lambda: int,
    "a function": lambda: print,
    "a module": lambda: np,
    "a hostile object": Hostile,
    "hostile objects": lambda: [Hostile()],
    "a hostile value": lambda: {"w": Hostile()},
    "a generator": lambda: (each for each in (1, 2)),
    "itself": endless,
    "deep lists": deep,
    "an array": lambda: np.ones((2, 2), np.float32),
    "an array of objects": lambda: np.array([None, "x"], object),
    "a masked array": lambda: np.ma.MaskedArray([1.0], [True]),
    "a handle of nothing": lambda: gradserve.TensorHandle("nobody", np.dtype(np.float32), (2,)),
    "a handle of nonsense": lambda: gradserve.TensorHandle(3, None, "x"),  # type: ignore[arg-type]
    "an accumulator of nonsense": lambda: gradserve.AccumulatorHandle(3, None, 1.5, "x", "y"),  # type: ignore[arg-type]
    "rows of nonsense": lambda: gradserve.IndexedSlices(object(), None, 3),  # type: ignore[arg-type]
    "specs of nonsense": lambda: {"w": gradserve.DenseSpec(3, "x"), "v": gradserve.SparseSpec(None, 1.5)},  # type: ignore[arg-type]
    "an initializer of nonsense": lambda: {"beta": gradserve.Initializer(3, value="x", seed=1.5)},  # type: ignore[arg-type]
    "a regularizer of nonsense": lambda: {"beta": gradserve.Regularizer(None, l1="x")},  # type: ignore[arg-type]
    "an adjustment of nonsense": lambda: gradserve.RandomAdjustment(3, "ab", seed="x"),  # type: ignore[arg-type]
}
