"""The blocking face and that of asyncio have the same methods."""

import inspect
from typing import Any

import pytest

import gradserve
import gradserve.aio
from tests.client.every_call import CALLS
from tests.client.test_errors import ERROR_TYPES

ACCUMULATORS = ["ConditionalAccumulator", "SparseConditionalAccumulator", "GradientAccumulator"]


def public_methods(face: type) -> set[str]:
    return {name for name, each in inspect.getmembers(face, callable) if not name.startswith("_")}


def is_awaited(method: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(method, stop=inspect.iscoroutinefunction))


@pytest.mark.parametrize("name", ["Client", "RawOps", "Parameters", *ACCUMULATORS])
def test_both_faces_are_alike(name: str) -> None:
    blocking, awaited = getattr(gradserve, name), getattr(gradserve.aio, name)
    assert public_methods(blocking) == public_methods(awaited)
    assert {each for each in dir(blocking) if not each.startswith("_")} == {
        each for each in dir(awaited) if not each.startswith("_")
    }
    for method in public_methods(blocking):
        ours, theirs = getattr(blocking, method), getattr(awaited, method)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, method
        assert ours.__doc__ == theirs.__doc__, method
        assert ours.__doc__, method
        assert not is_awaited(ours), method
        assert is_awaited(theirs), method


def test_connect_is_alike() -> None:
    assert inspect.signature(gradserve.connect).parameters == inspect.signature(gradserve.aio.connect).parameters
    assert gradserve.connect.__doc__ == gradserve.aio.connect.__doc__


@pytest.mark.parametrize("module", [gradserve, gradserve.aio])
def test_all_is_complete_and_sorted(module: Any) -> None:
    exported = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert set(module.__all__) == exported
    constants = [name for name in module.__all__ if name.isupper()]
    classes = [name for name in module.__all__ if not name.isupper() and name[0].isupper()]
    functions = [name for name in module.__all__ if name[0].islower()]
    assert list(module.__all__) == sorted(constants) + sorted(classes) + sorted(functions)
    assert {error_type.__name__ for error_type in ERROR_TYPES} <= set(gradserve.__all__)


def test_every_method_is_called_here() -> None:
    """The table names every method that makes a call."""
    # These make no call.
    called = {"empty", "new_request_id"} | {word for name in CALLS for word in name.split()}
    for face in (
        gradserve.Client,
        gradserve.BatchNormLayer,
        gradserve.Parameters,
        *(getattr(gradserve, name) for name in ACCUMULATORS),
    ):
        assert public_methods(face) - {"close", "take_indexed_slices_grad"} <= called
