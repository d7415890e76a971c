"""Makes methods from declared ops, with signatures and docstrings like those of written methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from gradserve.array_like import ArrayLike, DTypeLike
from gradserve.calls.exchange import Operation
from gradserve.calls.raw_ops.running import run
from gradserve.ops.declaration import Op
from gradserve.ops.signature import docstring_of, signature_of
from gradserve.results import Tensor, TensorLike

_NAMES_IN_SIGNATURES = {
    "ArrayLike": ArrayLike,
    "DTypeLike": DTypeLike,
    "Operation": Operation,
    "Sequence": Sequence,
    "Tensor": Tensor,
    "TensorLike": TensorLike,
}


def method_of(op: Op) -> Callable[..., Operation[Any]]:
    """Returns an op as a method that takes the op's arguments and returns the operation that computes it."""
    signature = signature_of(op)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    required = signature.parameters.keys() - defaults.keys() - {"self"}

    def method(self: object, /, *positional: object, **given: Any) -> Operation[Any]:
        arguments = defaults | given
        if positional or not required <= given.keys() or len(arguments) != len(defaults) + len(required):
            _refuse(method, signature, positional, given)
        return run(op, arguments)

    method.__name__ = method.__qualname__ = op.name
    method.__doc__ = docstring_of(op)
    method.__signature__ = signature  # type: ignore[attr-defined]
    method.__annotations__ = _annotations(op, signature)
    return method


def _refuse(
    method: Callable[..., Any], signature: inspect.Signature, positional: Sequence[object], given: Mapping[str, Any]
) -> None:
    """Raises the TypeError for a call that does not fit the signature."""
    try:
        signature.bind(None, *positional, **given)
    except TypeError as error:
        raise TypeError(f"{method.__qualname__}() {error}") from None


def _annotations(op: Op, signature: inspect.Signature) -> dict[str, Any]:
    """Returns the annotations of a signature, evaluated."""
    outputs = {each.__name__: each for each in op.output_tuples}
    return {
        name: _evaluated(each.annotation)
        for name, each in signature.parameters.items()
        if each.annotation is not each.empty
    } | {"return": _evaluate(signature.return_annotation, outputs)}


@cache
def _evaluated(annotation: str) -> Any:
    """Returns the annotation of an argument, evaluated. All ops together have a dozen, and each takes time."""
    return _evaluate(annotation, {})


def _evaluate(annotation: str, outputs: Mapping[str, Any]) -> Any:
    def written() -> None: ...

    written.__annotations__ = {"return": annotation}
    return get_type_hints(written, localns={**_NAMES_IN_SIGNATURES, **outputs})["return"]
