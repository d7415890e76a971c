"""Gives public objects the names and docstrings that users see, in help(), tracebacks and editors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")
_PACKAGES = ("gradserve.", "gradserve_protocol.", "gradserve_testing.")
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): .*(?:\n {8,}.*)*", re.MULTILINE)


class _Written(str):
    """An annotation shown as written in the source: ArrayLike, not the union that it stands for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class HiddenConstructor:
    """The empty signature of classes that only calls instantiate, so that help() shows no constructor.

    Instances, and subclasses with a constructor of their own, keep their signatures.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None or "__init__" in vars(owner):
            raise AttributeError("__signature__")
        return inspect.Signature()


def described_as(operation: Callable[..., Any], made: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Gives a method the docstring and the signature of an operation.

    Args:
        operation: The operation, from a module with `from __future__ import annotations`.
        made: The class that the method returns. None: it returns T for an operation annotated as Operation[T].
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
        # Annotations are evaluated where the operation is defined, where names from elsewhere are unknown.
        returned = _evaluated_result(operation, result) if made is None else made
        wrapped.__annotations__ = {**operation.__annotations__, "return": returned}
        return wrapped

    return decorate


def name_methods(owner: type) -> None:
    """Names a class's methods that were made from operations, and the operations too: TypeErrors name those."""
    for name, method in vars(owner).items():
        if isinstance(method, FunctionType) and hasattr(method, "__wrapped__") and method.__name__ == name:
            for each in (method, method.__wrapped__):
                each.__qualname__ = f"{owner.__qualname__}.{name}"


def shown(face: object, about: str = "") -> str:
    """Returns the repr of a face: its class, and what it stands for. Makes no call."""
    return f"<{type(face).__module__}.{type(face).__qualname__}{about and f' {about}'}>"


def publish(module: str, contents: Mapping[str, Any], names: Iterable[str]) -> None:
    """Names classes and functions, and their methods, after the module from which users import them.

    Args:
        module: The name of that module.
        contents: Its contents by name.
        names: The public names.
    """
    for name in names:
        public = contents[name]
        if not getattr(public, "__module__", "").startswith(_PACKAGES):
            continue  # an alias of someone else's type
        if isinstance(public, type):
            _publish_class(module, public)
        elif isinstance(public, FunctionType):
            public.__module__ = module


def complete_docstrings(owner: type, described_by: Mapping[str, str]) -> None:
    """Completes docstrings with the arguments, results, errors and, if they have none, the text of other methods.

    So methods that share most of their arguments describe these once. A description that a docstring already has is
    kept, and nothing is added that the method does not have.

    Args:
        owner: The class of the methods.
        described_by: For each method to complete, the name of the method that is described in full.
    """
    for name, full in described_by.items():
        method = getattr(owner, name)
        method.__doc__ = _completed(method, _sections(method), _sections(getattr(owner, full)))


def _publish_class(module: str, public: type) -> None:
    if any(isinstance(annotation, str) for annotation in public.__annotations__.values()):
        # Later evaluation would look into the new module, which lacks some of their names.
        hints = get_type_hints(public, include_extras=True)
        public.__annotations__ = {name: hints[name] for name in public.__annotations__}
    for method in vars(public).values():
        if isinstance(method, FunctionType) and method.__module__ != "typing":
            method.__module__ = module
    public.__module__ = module


def _result_of(operation: Callable[..., Any], signature: inspect.Signature) -> str:
    """Returns T of an operation annotated to return Operation[T], as it is written there."""
    annotation = signature.return_annotation
    found = re.fullmatch(r"Operation\[(.*)\]", annotation, re.DOTALL) if isinstance(annotation, str) else None
    if found is None:
        raise TypeError(
            f"expected -> Operation[...] on {operation.__qualname__}, in a module with `from __future__ import "
            f"annotations`, got {annotation}"
        )
    return found[1]


def _evaluated_result(operation: Callable[..., Any], written: str) -> Any:
    """Returns T as a type if the operation's annotations are evaluated already, otherwise as it is written."""
    annotation = operation.__annotations__["return"]
    return written if isinstance(annotation, str) else get_args(annotation)[-1]


def _completed(method: Callable[..., Any], own: dict[str, str], full: dict[str, str]) -> str:
    text = "" if "\n\n" in own["Text"] else full["Text"].partition("\n\n")[2]
    arguments = _entries(full["Args"]) | _entries(own.get("Args", ""))
    parts = [
        own["Text"],
        text,
        _listed("Args", [arguments[name] for name in list(inspect.signature(method).parameters)[1:]]),
    ]
    if "Returns" in full:
        parts.append(_listed("Returns", [own.get("Returns", full["Returns"])]))
    parts.append(_listed("Raises", [own.get("Raises", full["Raises"])]))
    return "\n\n".join(part for part in parts if part)


def _sections(method: Callable[..., Any]) -> dict[str, str]:
    text, *rest = _SECTION.split(inspect.getdoc(method) or "")
    return {"Text": text.strip(), **{name: body.strip("\n") for name, body in zip(rest[::2], rest[1::2], strict=True)}}


def _entries(section: str) -> dict[str, str]:
    return {found[1]: found[0] for found in _ENTRY.finditer(section)}


def _listed(title: str, entries: list[str]) -> str:
    return "\n".join([f"{title}:", *entries])
