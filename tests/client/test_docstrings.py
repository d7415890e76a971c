"""Every public method says what it takes, what it returns and what it raises; so do classes of their fields."""

import builtins
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import gradserve
from tests.client.test_public_names import methods

SECTION = r"\n{}:\n((?: .*\n|\n)*)"
FACES = [
    "Client",
    "ConditionalAccumulator",
    "SparseConditionalAccumulator",
    "GradientAccumulator",
    "Parameters",
    "BatchNormLayer",
]
METHODS = [
    pytest.param(method, id=method.__qualname__)
    for face in [*FACES, "RawOps"]
    for method in methods(getattr(gradserve, face)).values()
]


def entries(text: str, section: str) -> list[str]:
    """Returns the names that a section of a docstring describes."""
    found = re.search(SECTION.format(section), inspect.cleandoc(text) + "\n")
    return re.findall(r"^    \*?(\w+): \S", found[1], re.MULTILINE) if found else []


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: Callable[..., Any]) -> None:
    text = method.__doc__ or ""
    signature = inspect.signature(method)
    assert re.match(r"[A-Z][^\n]*[.:]\n|[A-Z][^\n]*\.$", text), "a first sentence in a line of its own"
    assert entries(text, "Args") == list(signature.parameters)[1:]
    returns = "\nReturns:\n" in inspect.cleandoc(text) or text.startswith("Returns ")
    assert returns == (str(signature.return_annotation) != "None")
    for error in entries(text, "Raises"):
        kind = getattr(builtins, error, None) or getattr(gradserve, error)
        assert issubclass(kind, OSError | gradserve.GradserveError)


@pytest.mark.parametrize("function", [gradserve.connect], ids=lambda function: function.__name__)
def test_functions(function: Callable[..., Any]) -> None:
    assert entries(function.__doc__ or "", "Args") == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", [name for name in gradserve.__all__ if inspect.isclass(getattr(gradserve, name))])
def test_classes(name: str) -> None:
    public = getattr(gradserve, name)
    if public is Any:
        return
    text = inspect.cleandoc(public.__doc__)
    assert re.match(r"[A-Z][^\n]*[.:](\n|$)", text), "a first sentence in a line of its own"
    if dataclasses.is_dataclass(public) and any(not each.startswith("_") for each in public.__annotations__):
        own = [each for each in public.__annotations__ if each != "_"]
        assert entries(text, "Attributes") == own
