"""Declarations of gradient ops: inputs, attributes and outputs, and the signature and docstring made of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeAlias, get_type_hints

import numpy as np
from google.protobuf.message import Message

from gradserve.batch_norm import IgnoredArgument
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import DType

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of the inputs from which those of others follow."""
Outputs: TypeAlias = type[tuple[Any, ...]]
"""A named tuple. Its annotations describe each output: Annotated[TensorT_co, "T, the shape of x."]."""
_WIDTH = 112
_ERRORS = {
    "InvalidArgumentError": "An argument is not valid; `field` names it.",
    "NotFoundError": "The tensor of a handle does not exist.",
    "ResourceExhaustedError": "The outputs do not fit into the server's memory.",
}


FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
INT32, INT8 = np.dtype(np.int32), np.dtype(np.int8)


@dataclass(frozen=True)
class SameAs:
    """The dtype of another input."""

    input: str

    def follow(self, dtype: DType) -> DType:
        """Returns the dtype that follows from the other input's."""
        return dtype


@dataclass(frozen=True)
class StatisticsOf:
    """The dtype of the statistics of another input: float64 for float64, else float32."""

    input: str

    def follow(self, dtype: DType) -> DType:
        """Returns the dtype that follows from the other input's."""
        return FLOAT64 if dtype == FLOAT64 else FLOAT32


@dataclass(frozen=True)
class Input:
    """A tensor that an op takes.

    Attributes:
        name: The name of the argument, and of the field of the request.
        dtype: The dtype of plain numbers: a fixed one, or one that follows from another input's.
        doc: Its dtype, shape and meaning.
        is_optional: Whether it may be left out, or be None.
        is_list: Whether it is a sequence of tensors.
        allowed_dtypes: The dtypes that a version takes, in TensorFlow's spelling. Empty: all that the server takes.
    """

    name: str
    dtype: DType | SameAs | StatisticsOf
    doc: str
    is_optional: bool = False
    is_list: bool = False
    allowed_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Required:
    """The default of an attribute that must be given."""


@dataclass(frozen=True)
class Attribute:
    """An argument that is not a tensor.

    Attributes:
        name: The name of the argument.
        kind: Its type as written in the signature: "float", "int", "bool", "str", "ArrayLike" or "DTypeLike".
        doc: Its meaning and unit.
        default: Its default.
        allowed: The texts that a version takes, after `convert`. Empty: all that the server takes.
        fields: The fields of the request that it becomes. None: the field of its name.
        convert: Converts what was given to what is sent. None: it is sent as given.
        no_effect: The reason why the op ignores it, given in a warning for a value other than 0. Empty: it has an
            effect.
    """

    name: str
    kind: str
    doc: str
    default: object = Required()
    allowed: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    convert: Callable[[Any, Argument], object] | None = None
    no_effect: str = ""


@dataclass(frozen=True)
class SingleOutput:
    """The only output of an op, returned by itself, without a named tuple.

    Attributes:
        field: The field of the response.
        doc: Its dtype, shape and meaning.
    """

    field: str
    doc: str


@dataclass(frozen=True)
class Field:
    """The field of the response for an output, if it is not the output's name."""

    name: str


@dataclass(frozen=True)
class Op:
    """An op. Its RPC is named after the request: FusedBatchNorm takes a FusedBatchNormRequest.

    Attributes:
        name: Its name in TensorFlow, or ours if TensorFlow has no such op.
        request: The type of the request.
        summary: One sentence.
        text: The docstring's text after the summary: formulas, and letters for sizes and dtypes.
        arguments: Its inputs and attributes, in the order of the signature.
        outputs: Its outputs.
        more_outputs: A flag among the attributes, and the outputs of the op when it is set.
        ignored: Returns the arguments that have no effect in a call, given its inputs and fields. None: all have one.
        newer: The version of the op that this one is a view of. Outputs without a description have the newer version's.
    """

    name: str
    request: type[Message]
    summary: str
    text: str
    arguments: tuple[Input | Attribute, ...]
    outputs: Outputs | SingleOutput
    more_outputs: tuple[str, Outputs] | None = None
    ignored: Callable[[Mapping[str, Any], Mapping[str, object]], Iterable[IgnoredArgument]] | None = None
    newer: Op | None = None

    @cached_property
    def rpc(self) -> str:
        """The name of its RPC."""
        return self.request.DESCRIPTOR.name.removesuffix("Request")

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The tensors that it takes."""
        return tuple(each for each in self.arguments if isinstance(each, Input))

    @cached_property
    def attributes(self) -> tuple[Attribute, ...]:
        """The other arguments."""
        return tuple(each for each in self.arguments if isinstance(each, Attribute))

    @cached_property
    def inputs_by_dtype(self) -> tuple[Input, ...]:
        """The tensors that it takes, each one after the one from which its dtype follows, if any."""
        return tuple(sorted(self.inputs, key=lambda each: not isinstance(each.dtype, np.dtype)))

    @cached_property
    def arguments_by_field(self) -> Mapping[str, str]:
        """The names of attributes by the fields that they become, if these have other names."""
        return {field: each.name for each in self.attributes for field in each.fields or ()}

    @cached_property
    def output_tuples(self) -> tuple[Outputs, ...]:
        """The types it returns: none if it has a single output, two if there are more outputs on demand."""
        if isinstance(self.outputs, SingleOutput):
            return ()
        return (self.outputs,) if self.more_outputs is None else (self.outputs, self.more_outputs[1])

    def output_doc(self, name: str) -> str:
        """Returns the description of an output: its own, or the newer version's."""
        for outputs in self.output_tuples:
            if name in (docs := _annotated(outputs, str)):
                text: str = docs[name]
                return text
        assert self.newer is not None, f"{self.name} does not describe {name}"
        return self.newer.output_doc(name)

    def older(
        self,
        name: str,
        summary: str,
        *,
        text: str | None = None,
        without: tuple[str, ...] = (),
        changed: Mapping[str, Input | Attribute] | None = None,
        outputs: Outputs | None = None,
    ) -> Op:
        """Declares an older version, a view of this one.

        Args:
            name: Its name.
            summary: Its summary.
            text: Its text after the summary. None: the same.
            without: The arguments that it does not have.
            changed: Arguments that it declares differently, by their names in this version.
            outputs: Its outputs. None: the same.
        """
        others = changed or {}
        arguments = tuple(others.get(each.name, each) for each in self.arguments if each.name not in without)
        return replace(
            self,
            name=name,
            summary=summary,
            text=self.text if text is None else text,
            arguments=arguments,
            outputs=outputs or self.outputs,
            newer=self,
        )


@cache
def fields_of(outputs: Outputs) -> Mapping[str, str]:
    """Returns the fields of the response, by the names of the outputs."""
    others = _annotated(outputs, Field)
    names: tuple[str, ...] = outputs._fields  # type: ignore[attr-defined]
    return {name: others[name].name if name in others else name for name in names}


def _annotated(outputs: Outputs, kind: type[Any]) -> Mapping[str, Any]:
    """Returns the annotations of this kind, by the names of the outputs."""
    return {
        name: said
        for name, hint in _hints_of(outputs).items()
        for said in getattr(hint, "__metadata__", ())
        if type(said) is kind
    }


@cache
def _hints_of(outputs: Outputs) -> Mapping[str, Any]:
    return get_type_hints(outputs, include_extras=True)


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
