"""The argument `name` of TensorFlow's raw ops, which names the node of a graph."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from gradserve.calls.raw_ops.accumulator_arguments import optional_text

DOC = "name: Has no effect: TensorFlow's name of a node."
_END_OF_ARGUMENTS = re.compile(r"\n\n(?=(Returns|Raises):\n)")


def accept_names(ops: type) -> None:
    """Lets ops without an argument `name` take one."""
    for op_name, op in inspect.getmembers(ops, inspect.isfunction):
        if op_name[0].isupper() and "name" not in inspect.signature(op).parameters:
            setattr(ops, op_name, _with_name(op))


def _with_name(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def method(self: object, /, *positional: Any, name: str | None = None, **given: Any) -> Any:
        optional_text(name, "name")
        return op(self, *positional, **given)

    signature = inspect.signature(op)
    parameter = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation="str | None", default=None)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), parameter]
    )
    method.__annotations__ = {**op.__annotations__, "name": "str | None"}
    method.__doc__ = _END_OF_ARGUMENTS.sub(f"\n    {DOC}\n\n", inspect.getdoc(op) or "", count=1)
    return method
