"""What users see of public things, in help(), errors and tracebacks, has the names that users know."""

import builtins
import importlib
import inspect
import pickle
import re
import typing
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy.typing
import pytest

import gradserve
import gradserve.aio
from deploy.generate_face_types import MODULES as MODULES_WITH_TYPES
from deploy.generate_face_types import types_of

MODULES = {"gradserve": gradserve, "gradserve.aio": gradserve.aio}
CLASSES = [
    pytest.param(module, getattr(contents, name), id=f"{module}.{name}")
    for module, contents in MODULES.items()
    for name in contents.__all__
    if inspect.isclass(getattr(contents, name))
]

KNOWN = {
    *(*dir(builtins), *typing.__all__, *numpy.typing.__all__, *gradserve.__all__),
    *(f"optim.{name}" for name in gradserve.optim.__all__),
    *(f"reductions.{name}" for name in gradserve.reductions.__all__),
    *(f"codecs.{name}" for name in gradserve.codecs.__all__),
    *("np.int32", "os.PathLike", "..."),
}


def methods(public: type) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of a class, with those that it inherits from others of gradserve."""
    found = inspect.getmembers(public, inspect.isfunction)
    return {
        name: method
        for name, method in found
        if (not name.startswith("_") or name == "__call__") and method.__module__.startswith("gradserve")
    }


@pytest.mark.parametrize("module", list(MODULES))
def test_public_things_are_of_the_module_they_are_imported_from(module: str) -> None:
    for name in MODULES[module].__all__:
        public = getattr(MODULES[module], name)
        if inspect.isfunction(public) or (inspect.isclass(public) and public is not Any):  # else an alias, a constant
            assert (public.__module__, public.__qualname__) == (module, name)
            assert pickle.loads(pickle.dumps(public)) is public  # noqa: S301


@pytest.mark.parametrize(("module", "public"), CLASSES)
def test_methods_are_of_a_public_class(module: str, public: type) -> None:
    for name, method in methods(public).items():
        owner, _, last = method.__qualname__.partition(".")
        assert (method.__module__, last) == (module, method.__name__), name
        assert issubclass(public, getattr(MODULES[module], owner)), name


@pytest.mark.parametrize(("module", "public"), CLASSES)
def test_signatures_have_names_that_users_know(module: str, public: type) -> None:
    """ArrayLike is that, not the union that it stands for."""
    for name, method in methods(public).items():
        signature = inspect.signature(method)
        annotations = [each.annotation for each in signature.parameters.values()] + [signature.return_annotation]
        texts = [str(each) for each in annotations if each is not inspect.Signature.empty]
        names = {word for text in texts for word in re.findall(r"[\w.]+", re.sub(r"'\w+'", "", text))}
        assert names <= KNOWN, name


@pytest.mark.parametrize(("module", "public"), CLASSES)
def test_annotations_can_be_evaluated(module: str, public: type) -> None:
    """As editors and other tools do."""
    get_type_hints(public)
    for name, method in methods(public).items():
        hints = get_type_hints(method)
        assert "return" in hints, name
        assert set(hints) - {"return"} == set(inspect.signature(method).parameters) - {"self"}, name
        if public is not gradserve.Interceptor:  # whose generators are not operations
            assert get_origin(hints["return"]) is not Generator, name


@pytest.mark.parametrize("module", list(MODULES))
def test_help_is_silent_about_constructors_that_nobody_calls(module: str) -> None:
    for name in ("ConditionalAccumulator", "GradientAccumulator", "BatchNormLayer", "RawOps"):
        assert str(inspect.signature(getattr(MODULES[module], name))) == "()"
    assert str(inspect.signature(MODULES[module].Client)).startswith("(address")


def test_an_object_that_is_called_has_the_signature_of_that(client: gradserve.Client) -> None:
    assert str(inspect.signature(client.batch_norm())).startswith("(inputs: TensorLike, is_training: bool = True")


@pytest.mark.parametrize("module", list(MODULES_WITH_TYPES))
def test_types_of_arrays_and_handles_are_up_to_date(module: str) -> None:
    """Else run: make face-types."""
    path = importlib.import_module(module).__file__
    assert path is not None
    assert Path(path).with_suffix(".pyi").read_text() == types_of(module)


def test_a_wrong_call_names_the_method(client: gradserve.Client) -> None:
    with pytest.raises(TypeError, match=r"^Client\.get\(\) missing 1 required positional argument: 'handle'$"):
        client.get()  # type: ignore[call-arg]
    accumulator = client.conditional_accumulator("float32")
    with pytest.raises(TypeError, match=r"^Accumulator\.info\(\) got an unexpected keyword argument 'verbose'$"):
        accumulator.info(verbose=True)  # type: ignore[call-arg]


def test_an_error_prints_with_its_public_name(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        client.conditional_accumulator("float32", reduction_type="MEDIAN")
    assert raised.exconly().startswith("gradserve.InvalidArgumentError: ")
