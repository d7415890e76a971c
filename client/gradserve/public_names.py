"""What help(), tracebacks and editors show of public things: the names by which users know them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")


class _Written(str):
    """An annotation that is shown as it is written in the source: ArrayLike, not the union that it stands for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class HiddenConstructor:
    """The signature of classes of which only calls make objects: help() says nothing of their constructor.

    Objects, and subclasses with a constructor of their own, have the signatures that they have anyway.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None or "__init__" in vars(owner):
            raise AttributeError("__signature__")
        return inspect.Signature()


def described_as(operation: Callable[..., Any], made: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Gives a method the docstring and the signature of an operation.

    Args:
        operation: Of a module whose annotations are not evaluated (`from __future__ import annotations`).
        made: The class that the method returns. None: it returns T, where the operation is annotated as Operation[T].
    """
    signature = inspect.signature(operation)
    result = _result_of(operation, signature) if made is None else made.__name__
    parameters = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=_Written(parameter.annotation))
        for parameter in signature.parameters.values()
    ]

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        wrapped = functools.wraps(operation)(method)
        wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=_Written(result)
        )
        # Whoever evaluates them does so where the operation is defined, so a class of elsewhere is not a name here.
        returned = _evaluated_result(operation, result) if made is None else made
        wrapped.__annotations__ = {**operation.__annotations__, "return": returned}
        return wrapped

    return decorate


def name_methods(owner: type) -> None:
    """Names the methods that a class has of operations after the class, and the operations too: errors name those."""
    for name, method in vars(owner).items():
        if isinstance(method, FunctionType) and hasattr(method, "__wrapped__") and method.__name__ == name:
            for each in (method, method.__wrapped__):
                each.__qualname__ = f"{owner.__qualname__}.{name}"


def shown(face: object, about: str = "") -> str:
    """Returns the repr of a face: its class, and what it is the face of. Nothing is asked of the server for it."""
    return f"<{type(face).__module__}.{type(face).__qualname__}{about and f' {about}'}>"


def publish(module: str, contents: Mapping[str, Any], names: Iterable[str]) -> None:
    """Names classes and functions after the module from which users import them, and their methods too.

    Args:
        module: The name of that module.
        contents: What is in it, by name.
        names: The public ones.
    """
    for name in names:
        public = contents[name]
        if not getattr(public, "__module__", "").startswith("gradserve."):
            continue  # an alias of what others have made
        if isinstance(public, type):
            _publish_class(module, public)
        elif isinstance(public, FunctionType):
            public.__module__ = module


def _publish_class(module: str, public: type) -> None:
    if any(isinstance(annotation, str) for annotation in public.__annotations__.values()):
        # Who evaluates them later looks into the new module, where not all of their names are.
        hints = get_type_hints(public, include_extras=True)
        public.__annotations__ = {name: hints[name] for name in public.__annotations__}
    for method in vars(public).values():
        if isinstance(method, FunctionType) and method.__module__ != "typing":
            method.__module__ = module
    public.__module__ = module


def _result_of(operation: Callable[..., Any], signature: inspect.Signature) -> str:
    """Returns T of an operation that is annotated to return Operation[T], as it is written there."""
    annotation = signature.return_annotation
    found = re.fullmatch(r"Operation\[(.*)\]", annotation, re.DOTALL) if isinstance(annotation, str) else None
    if found is None:
        raise TypeError(
            f"expected -> Operation[...] on {operation.__qualname__}, in a module with `from __future__ import "
            f"annotations`, got {annotation}"
        )
    return found[1]


def _evaluated_result(operation: Callable[..., Any], written: str) -> Any:
    """Returns T as a type, if the annotations of the operation are evaluated already, else as it is written."""
    annotation = operation.__annotations__["return"]
    return written if isinstance(annotation, str) else get_args(annotation)[-1]
