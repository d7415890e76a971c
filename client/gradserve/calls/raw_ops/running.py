"""Computes declared ops on the server."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradserve.batch_norm_results import IgnoredArgument
from gradserve.calls.argument_names import arguments_named
from gradserve.calls.exchange import Operation
from gradserve.calls.fields import plain_field
from gradserve.calls.ignored_arguments import warn_of_ignored
from gradserve.calls.raw_ops.accumulator_arguments import optional_text
from gradserve.calls.raw_ops.graphs import warn_of_graph
from gradserve.calls.tensorflow_text import check_attribute, check_text_attribute, dtype_text
from gradserve.calls.tensors.arguments import delete_quietly
from gradserve.calls.tensors.inputs import as_op_input
from gradserve.calls.tensors.operations import OpInputs, call_with_inputs, listed, placement_of, receive_outputs
from gradserve.conversion.argument import Argument
from gradserve.conversion.casting import as_tensor_of
from gradserve.conversion.plain import INT32, as_integer, as_list, as_number
from gradserve.errors import InvalidArgumentError
from gradserve.ops.declaration import (
    FLOATS,
    Attribute,
    Input,
    Op,
    Required,
    SameAs,
    SingleOutput,
    StatisticsOf,
    fields_of,
)
from gradserve.ops.declaration import INT32 as INT32_DTYPE
from gradserve.results import TensorHandle
from gradserve.wire.arrays import DType


def run(op: Op, arguments: Mapping[str, Any]) -> Operation[Any]:
    """Computes an op.

    Small arrays travel inside the request; larger ones are uploaded first and deleted afterwards.

    Args:
        op: The op's declaration.
        arguments: All arguments of its signature, by name.

    Returns:
        The op's named tuple, or its single output: handles if outputs stay on the server, otherwise new arrays.
    """
    inputs = _inputs(op, arguments)
    fields = {field: value for each in op.attributes for field, value in _fields(op, each, _given(each, arguments))}
    optional_text(arguments["name"], "name")
    for ignored in () if op.ignored is None else op.ignored(inputs, fields):
        warn_of_ignored(ignored, op.name)
    placement = placement_of(keep=arguments["keep"], lease=arguments["lease"])
    with arguments_named(op.arguments_by_field):
        reply = yield from call_with_inputs(
            "GradientOpsService",
            op.rpc,
            inputs,
            lambda tensors: op.request(**tensors, **fields, placement=placement),
            device="auto",
        )
    tensors = {part.name: list(value) if part.is_repeated else value for part, value in reply.message.ListFields()}
    received = yield from receive_outputs(
        reply, [each for value in tensors.values() for each in listed(value)], keep=arguments["keep"]
    )
    supply = iter(received)
    outputs = {
        name: [next(supply) for _ in value] if isinstance(value, list) else next(supply)
        for name, value in tensors.items()
    }
    return (yield from _returned(op, fields, outputs))


def _inputs(op: Op, arguments: Mapping[str, Any]) -> dict[str, OpInputs]:
    converted: dict[str, Any] = {}
    for tensor in op.inputs_by_dtype:
        value = arguments[tensor.name]
        if tensor.is_optional and value is None:
            continue
        warn_of_graph(value, f"{tensor.name} of {op.name}")
        if isinstance(tensor.dtype, np.dtype):
            converted[tensor.name] = _converted(tensor, value, tensor.dtype)
            continue
        source = converted[tensor.dtype.input].dtype
        dtype = tensor.dtype.follow(source)
        converted[tensor.name] = _converted(tensor, value, dtype)
        _check_dtype(tensor, converted[tensor.name].dtype, dtype, source)
    return {tensor.name: converted[tensor.name] for tensor in op.inputs if tensor.name in converted}


def _converted(tensor: Input, value: Any, dtype: DType) -> OpInputs:
    if tensor.is_list:
        elements = as_list(value, "a list of tensors", Argument(tensor.name))
        return [as_op_input(each, dtype, f"{tensor.name}[{index}]") for index, each in enumerate(elements)]
    converted = as_op_input(value, dtype, tensor.name)
    if dtype == INT32_DTYPE and not isinstance(converted, TensorHandle) and converted.dtype.kind in "iu":
        return as_tensor_of(dtype, value, Argument(tensor.name))
    if tensor.allowed_dtypes:
        check_attribute(dtype_text(converted.dtype), "T", tensor.allowed_dtypes, field=tensor.name)
    return converted


def _check_dtype(tensor: Input, dtype: DType, expected: DType, source: DType) -> None:
    if dtype != expected and source.name in FLOATS:
        of = tensor.dtype.input if isinstance(tensor.dtype, SameAs | StatisticsOf) else ""
        raise InvalidArgumentError(
            f"expected {expected} for {tensor.name}, as {of} is {source}; got {dtype}", field=tensor.name
        )


def _given(attribute: Attribute, arguments: Mapping[str, Any]) -> Any:
    """Returns what was given for an attribute; its default for None, as TensorFlow's wrappers do."""
    value = arguments[attribute.name]
    return attribute.default if value is None and not isinstance(attribute.default, Required) else value


def _fields(op: Op, attribute: Attribute, value: Any) -> Iterable[tuple[str, object]]:
    """Yields the names and values of the fields for an attribute."""
    argument = Argument(attribute.name)
    if attribute.no_effect:
        _warn_if_given(op, attribute, value, argument)
        return
    if attribute.convert is not None:
        value = attribute.convert(value, argument)
    if attribute.allowed:
        check = check_text_attribute if attribute.kind == "str" else check_attribute
        check(value, attribute.name, attribute.allowed)
    for field in (attribute.name,) if attribute.fields is None else attribute.fields:
        yield field, plain_field(op.request, field, value, argument)


def _warn_if_given(op: Op, attribute: Attribute, value: Any, argument: Argument) -> None:
    number = as_integer(value, argument, INT32) if attribute.kind == "int" else as_number(value, argument)
    if number:
        warn_of_ignored(IgnoredArgument(attribute.name, attribute.no_effect), op.name)


def _returned(op: Op, sent: Mapping[str, object], outputs: dict[str, Any]) -> Operation[Any]:
    if isinstance(op.outputs, SingleOutput):
        return outputs[op.outputs.field]
    made = op.outputs
    if op.more_outputs is not None and sent[op.more_outputs[0]]:
        made = op.more_outputs[1]
    fields = fields_of(made)
    # The server computes the newest version; outputs that an older version does not return are not left there.
    unknown = [outputs[name] for name in outputs.keys() - set(fields.values())]
    yield from delete_quietly([each.handle for each in unknown if isinstance(each, TensorHandle)])
    return made(**{name: outputs[field] for name, field in fields.items()})
