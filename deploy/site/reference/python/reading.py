"""Reads the public names of the client.

Most is read from the source, so that neither PyTorch nor JAX need be installed. The classes whose methods are made of
operations when they are imported are looked at as they are then.
"""

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe
from griffe import Attribute, Class, Function, Module

from deploy.site.places import ROOT
from deploy.site.reference.python.documented import Documented
from deploy.site.reference.python.signatures import laid_out, of_callable, of_declaration


def read_modules(names: Iterable[str]) -> dict[str, tuple[Documented, ...]]:
    """Returns what each of some modules of the client publishes: functions first, then classes, then values."""
    package = griffe.load(
        "gradserve",
        search_paths=[ROOT / "client", ROOT / "server"],
        allow_inspection=False,
        resolve_aliases=True,
        resolve_external=True,
    )
    return {name: tuple(sorted(_module(package, name), key=_kind)) for name in names}


def read_docstring(module: str) -> str:
    """Returns the docstring of a module of the client, whatever it imports."""
    return (
        ast.get_docstring(ast.parse((ROOT / "client" / Path(*module.split("."))).with_suffix(".py").read_text())) or ""
    )


def _kind(found: Documented) -> int:
    return ("function", "class", "value").index(found.kind)


def _module(package: Any, name: str) -> tuple[Documented, ...]:
    module = package["api" if name == "gradserve" else name.removeprefix("gradserve.")]
    return tuple(each for public in module.exports or () for each in _public(module, str(public), name))


def _public(module: Any, public: str, name: str) -> Iterator[Documented]:
    found = _resolved(module, public)
    if isinstance(found, Module):
        return  # has a page, or a section, of its own
    if isinstance(found, Class):
        yield _class(found, public, name)
    elif isinstance(found, Function):
        yield _function(found, public, name)
    elif isinstance(found, Attribute):
        yield Documented(
            name,
            public,
            "value",
            _source(found),
            f"{public} = {found.value}" if found.value is not None else public,
            _text(found),
        )


def _resolved(module: Any, public: str) -> Any:
    found = module[public]
    if found.is_alias:
        found = found.final_target
    if isinstance(found, Module) and public in found.members:  # a module named like the function in it
        return _resolved(found, public)
    return found


def _class(found: Class, public: str, module: str) -> Documented:
    face = _face(module, public)
    if face is None:
        members = [*_members(found, public, module), *_values(found, public, module)]
    else:
        values = (each for each in _values(found, public, module) if each.kind == "value")
        members = [*values, *_face_members(face, public, module)]
    signature = "" if face else _constructor(found, public)
    return Documented(module, public, "class", _source(found), signature, _text(found), tuple(members))


def _constructor(found: Class, public: str) -> str:
    """Returns how instances are made, or what a named tuple has; "" for enums, and for errors without arguments."""
    constructor = found.members.get("__init__")
    if isinstance(constructor, Function):
        return of_declaration(public, constructor)
    if any("NamedTuple" in str(base) for base in found.bases):
        return laid_out(public, [name for name, each in found.members.items() if isinstance(each, Attribute)], "")
    return ""


def _face(module: str, public: str) -> type | None:
    """Returns a class whose methods are only there once it is imported; None if this is no such class."""
    if module not in ("gradserve", "gradserve.aio"):
        return None
    from gradserve.face import AsyncFace, BlockingFace

    found = getattr(importlib.import_module(module), public)
    return found if isinstance(found, type) and issubclass(found, BlockingFace | AsyncFace) else None


def _face_members(face: type, public: str, module: str) -> Iterator[Documented]:
    seen = set()
    for owner in face.__mro__:
        if not owner.__module__.startswith("gradserve") or owner.__name__.endswith("Face"):
            continue
        for name, member in vars(owner).items():
            if name in seen or (name.startswith("_") and name != "__call__"):
                continue
            seen.add(name)
            if isinstance(member, property):
                yield _of_face(member, "property", "", public, name, module)
            elif inspect.isfunction(member):
                shown = public.lower() if name == "__call__" else name
                yield _of_face(member, "function", of_callable(shown, member), public, name, module)


def _of_face(member: Any, kind: str, signature: str, public: str, name: str, module: str) -> Documented:
    return Documented(module, f"{public}.{name}", kind, module, signature, inspect.getdoc(member) or "")


def _members(found: Class, public: str, module: str) -> Iterator[Documented]:
    for name, member in found.members.items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, Function):
            kind = "property" if "property" in member.labels else "function"
            signature = of_declaration(name, member) if kind == "function" else ""
            yield Documented(module, f"{public}.{name}", kind, _source(member), signature, _text(member))


def _values(found: Class, public: str, module: str) -> Iterator[Documented]:
    for name, member in found.members.items():
        if isinstance(member, Attribute) and not name.startswith("_") and (text := _text(member) or _annotated(member)):
            kind = "property" if "property" in member.labels else "value"
            yield Documented(module, f"{public}.{name}", kind, _source(member), "", text)


def _annotated(member: Attribute) -> str:
    """Returns the text of an annotation `Annotated[T, "text"]`."""
    match ast.parse(str(member.annotation), mode="eval").body:
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([_, ast.Constant(str(text))])):
            return text
    return ""


def _function(found: Function, public: str, module: str) -> Documented:
    return Documented(module, public, "function", _source(found), of_declaration(public, found), _text(found))


def _text(found: Any) -> str:
    return inspect.cleandoc(found.docstring.value) if found.docstring else ""


def _source(found: Any) -> str:
    return str(found.module.path)
