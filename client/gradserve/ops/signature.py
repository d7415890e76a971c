"""The signature and the docstring of an op, from its declaration."""

import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

from gradserve.ops.declaration import Attribute, Input, Op, Required, SingleOutput, fields_of

_WIDTH = 112

_ERRORS = {
    "InvalidArgumentError": "An argument is not valid; `field` names it.",
    "NotFoundError": "The tensor of a handle does not exist.",
    "ResourceExhaustedError": "The outputs do not fit into the server's memory.",
}


def signature_of(op: Op) -> inspect.Signature:
    """Returns the signature of an op as a method: its arguments, `name`, `keep` and `lease`, all of them keywords."""
    return inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
                for name, annotation, default in _parameters(op)
            ),
        ],
        return_annotation=f"Operation[{_result(op)}]",
    )


def docstring_of(op: Op) -> str:
    """Returns the docstring of an op, in the sections of Google's style."""
    is_single = isinstance(op.outputs, SingleOutput)
    arguments = {each.name: each.doc for each in op.arguments} | {
        "name": "Has no effect: TensorFlow's name of a node.",
        "keep": f"Whether to leave the output{'' if is_single else 's'} on the server and return "
        f"{'its handle' if is_single else 'their handles'}.",
        "lease": f"Seconds that {'it lives' if is_single else 'they live'} there without use; None for the "
        "server's default.",
    }
    parts = [
        op.summary,
        inspect.cleandoc(op.text),
        _section("Args", arguments),
        _returns(op),
        _section("Raises", _ERRORS),
    ]
    return "\n\n".join(part for part in parts if part)


def _parameters(op: Op) -> Iterator[tuple[str, str, object]]:
    for each in op.arguments:
        if isinstance(each, Attribute):
            default = inspect.Parameter.empty if isinstance(each.default, Required) else each.default
            yield each.name, each.kind if isinstance(each.default, Required) else f"{each.kind} | None", default
        else:
            yield each.name, _annotation(each), None if each.is_optional else inspect.Parameter.empty
    yield "name", "str | None", None
    yield "keep", "bool", False
    yield "lease", "float | None", None


def _annotation(tensor: Input) -> str:
    if tensor.is_list:
        return "Sequence[TensorLike]"
    return "TensorLike | None" if tensor.is_optional else "TensorLike"


def _result(op: Op) -> str:
    return " | ".join(f"{each.__name__}[Tensor]" for each in op.output_tuples) or "Tensor"


def _section(title: str, entries: dict[str, str]) -> str:
    return "\n".join([f"{title}:", *(_wrapped(f"{name}: {doc}", "    " * 2) for name, doc in entries.items())])


def _returns(op: Op) -> str:
    if isinstance(op.outputs, SingleOutput):
        return f"Returns:\n{_wrapped(op.outputs.doc, '    ')}"
    return _section("Returns", {name: op.output_doc(name) for name in fields_of(op.output_tuples[-1])})


@cache
def _wrapped(text: str, later_indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent=later_indent)
