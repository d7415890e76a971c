"""Writes the types of the client's classes whose methods return arrays, or handles with `keep=True`.

    python deploy/generate_face_types.py client

Such a method has one signature, but mypy and editors need one for each value of `keep`. So the modules of these classes
have .pyi files beside them, with overloads and docstrings made from what help() shows.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradserve
from gradserve.ops import OPS

MODULES = {
    "gradserve.raw_ops": "RawOps",
    "gradserve.aio.raw_ops": "RawOps",
    "gradserve.batch_norm_layer": "BatchNormLayer",
    "gradserve.aio.batch_norm_layer": "BatchNormLayer",
}
_IMPORTED = {
    "collections.abc": {"Mapping", "Sequence"},
    "typing": {"Any", "Literal", "Self", "overload"},
    "numpy.typing": {"NDArray"},
    "gradserve": set(gradserve.__all__),
}
_FLAGS = {op.name: op.more_outputs[0] for op in OPS if op.more_outputs is not None}
"""The flag of each op that returns more outputs with a flag."""

Signature = tuple[str, str]
"""The parameters of a method, and the type that it returns."""


def types_of(module: str) -> str:
    """Returns the contents of the .pyi file of a module."""
    name = MODULES[module]
    face: Any = getattr(importlib.import_module(module), name)
    (base,) = face.__orig_bases__
    (calls,) = base.__args__
    body = [f"    {line}".rstrip() for line in _members(face)]
    return "\n".join(
        [
            "# Made by deploy/generate_face_types.py; do not edit.",
            "",
            *_imports(" ".join(line for line in body if re.match(r" +(@|def |async def )", line))),
            f"from {calls.__module__} import {calls.__name__}",
            f"from {base.__origin__.__module__} import {base.__origin__.__name__}",
            "",
            f"class {name}({base.__origin__.__name__}[{calls.__name__}]):",
            *body,
            "",
        ]
    )


def _imports(body: str) -> Iterator[str]:
    used = set(re.findall(r"\w+", re.sub(r"def \w+", "", body)))
    if "np" in used:
        yield "import numpy as np"
    for module, names in _IMPORTED.items():
        if found := sorted(names & used):
            yield f"from {module} import {', '.join(found)}"


def _members(face: type) -> Iterator[str]:
    for name, member in vars(face).items():
        if isinstance(member, property):
            yield "@property"
            yield from _method(name, member.fget)
        elif inspect.isfunction(member) and name != "__getattr__":  # which raises: it would hide misspelt names
            yield from _method(name, member)


def _method(name: str, method: Any) -> Iterator[str]:
    text = str(inspect.signature(method))
    if not hasattr(method, "__wrapped__"):  # defined in the class itself, so its annotations are in quotes
        text = text.replace("'", "")
    parameters, _, result = text.rpartition(" -> ")
    declared = (parameters, result)
    by_flag = _of_flag(declared, _FLAGS[name]) if name in _FLAGS else [declared]
    signatures = [kept for each in by_flag for kept in _of_keep(each)]
    kind = "async def" if inspect.iscoroutinefunction(method) else "def"
    for number, (parameters, result) in enumerate(signatures):
        if len(signatures) > 1:
            yield "@overload"
        if number == 0:
            yield f"{kind} {name}{parameters} -> {result}:"
            yield from _docstring(method)
        else:
            yield f"{kind} {name}{parameters} -> {result}: ..."


def _docstring(method: Any) -> Iterator[str]:
    text = inspect.cleandoc(method.__doc__ or "")
    lines = f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
    for line in lines.splitlines():
        yield f"    {line}".rstrip()


def _of_keep(signature: Signature) -> Iterator[Signature]:
    """Yields overloads for arrays, for handles, and for callers that do not know the value of `keep`."""
    parameters, result = signature
    before, declared, after = parameters.partition("keep: bool = False")
    if not declared:
        yield signature
        return
    yield f"{before}keep: Literal[False] = False{after}", re.sub(r"\bTensor\b", "NDArray[Any]", result)
    # Without a default, it can only be a keyword.
    if "*, " in before:
        yield f"{before}keep: Literal[True]{after}", re.sub(r"\bTensor\b", "TensorHandle", result)
    else:
        yield f"{before}*, keep: Literal[True]{after.replace('*, ', '')}", re.sub(r"\bTensor\b", "TensorHandle", result)
    yield signature


def _of_flag(signature: Signature, flag: str) -> Iterator[Signature]:
    """Yields overloads of an op that returns more outputs with a flag."""
    parameters, result = signature
    fewer, more = result.split(" | ")
    before, _, after = parameters.partition(f"{flag}: bool | None = False")
    yield f"{before}{flag}: Literal[False] | None = False{after}", fewer
    yield f"{before}{flag}: Literal[True]{after}", more


def main(folder: Path) -> None:
    """Writes all files."""
    for module in MODULES:
        folder.joinpath(*module.split(".")).with_suffix(".pyi").write_text(types_of(module))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
