"""Declarations of ops: their arguments, outputs and documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeAlias, get_type_hints

import numpy as np
from google.protobuf.message import Message

from gradserve.batch_norm_results import IgnoredArgument
from gradserve.conversion.argument import Argument
from gradserve.wire.arrays import DType

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of the inputs from which those of others follow."""
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


Outputs: TypeAlias = type[tuple[Any, ...]]
"""A named tuple. Its annotations describe each output: Annotated[TensorT_co, "T, the shape of x."]."""


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
