"""Writes the types of the classes of the client whose methods return arrays, or handles with `keep=True`.

    python deploy/generate_face_types.py client

Such a method has one signature, but mypy and editors need one for each value of `keep`. So the modules of these classes
have .pyi files beside them, with overloads, made of the signatures that help() shows.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradserve

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
_GRU_GRADIENTS = "GRUBlockCellGradOutputs[Tensor] | GRUBlockCellAllGradOutputs[Tensor]"

Signature = tuple[str, str]
"""The parameters of a method, and what it returns."""


def types_of(module: str) -> str:
    """Returns the contents of the .pyi file of a module."""
    name = MODULES[module]
    face: Any = getattr(importlib.import_module(module), name)
    (base,) = face.__orig_bases__
    (calls,) = base.__args__
    body = [f"    {line}" for line in _members(face)]
    return "\n".join(
        [
            "# Made by deploy/generate_face_types.py; do not edit.",
            "",
            *_imports("\n".join(body)),
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
        elif inspect.isfunction(member):
            yield from _method(name, member)


def _method(name: str, method: Any) -> Iterator[str]:
    text = str(inspect.signature(method))
    if not hasattr(method, "__wrapped__"):  # written in the class itself, so its annotations are in quotes
        text = text.replace("'", "")
    parameters, _, result = text.rpartition(" -> ")
    signatures = [kept for each in _of_gru((parameters, result)) for kept in _of_keep(each)]
    for parameters, result in signatures:
        if len(signatures) > 1:
            yield "@overload"
        kind = "async def" if inspect.iscoroutinefunction(method) else "def"
        yield f"{kind} {name}{parameters} -> {result}: ..."


def _of_keep(signature: Signature) -> Iterator[Signature]:
    """Makes overloads for arrays, for handles, and for callers that leave it open."""
    parameters, result = signature
    before, declared, after = parameters.partition("keep: bool = False")
    if not declared:
        yield signature
        return
    yield f"{before}keep: Literal[False] = False{after}", re.sub(r"\bTensor\b", "NDArray[Any]", result)
    # Without a default it can only be a keyword.
    if "*, " in before:
        yield f"{before}keep: Literal[True]{after}", re.sub(r"\bTensor\b", "TensorHandle", result)
    else:
        yield f"{before}*, keep: Literal[True]{after.replace('*, ', '')}", re.sub(r"\bTensor\b", "TensorHandle", result)
    yield signature


def _of_gru(signature: Signature) -> Iterator[Signature]:
    """Makes overloads for four outputs and for eight."""
    parameters, result = signature
    if result != _GRU_GRADIENTS:
        yield signature
        return
    four, eight = result.split(" | ")
    before, _, after = parameters.partition("weight_gradients: bool = False")
    yield f"{before}weight_gradients: Literal[False] = False{after}", four
    yield f"{before}weight_gradients: Literal[True]{after}", eight


def main(folder: Path) -> None:
    """Writes all the files."""
    for module in MODULES:
        folder.joinpath(*module.split(".")).with_suffix(".pyi").write_text(types_of(module))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
