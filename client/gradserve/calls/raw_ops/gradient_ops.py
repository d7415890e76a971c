"""The gradient ops of `RawOps`: methods made from declared ops, with signatures and docstrings like written ones."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from gradserve.batch_norm import IgnoredArgument
from gradserve.calls.arguments import (
    arguments_named,
    as_op_input,
    check_attribute,
    check_text_attribute,
    depth_in_package,
    dtype_text,
    warn_of_ignored,
)
from gradserve.calls.exchange import Operation
from gradserve.calls.tensors import OpInputs, call_with_inputs, delete_quietly, listed, placement_of, receive_outputs
from gradserve.conversion.plain import INT32, as_integer, as_list, as_number, as_text, plain_field
from gradserve.conversion.tensors import as_tensor_of
from gradserve.ops.declaration import (
    FLOATS,
    Attribute,
    Input,
    Op,
    Required,
    SameAs,
    SingleOutput,
    StatisticsOf,
    docstring_of,
    fields_of,
    signature_of,
)
from gradserve.ops.declaration import INT32 as INT32_DTYPE
from gradserve.results import ArrayLike, DTypeLike, Tensor, TensorHandle, TensorLike
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import DType
from gradserve_protocol.errors import InvalidArgumentError

_NAMES_IN_SIGNATURES = {
    "ArrayLike": ArrayLike,
    "DTypeLike": DTypeLike,
    "Operation": Operation,
    "Sequence": Sequence,
    "Tensor": Tensor,
    "TensorLike": TensorLike,
}


def warn_of_graph(name: str) -> None:
    """Warns about a tensor that requires a gradient: the results of raw ops are arrays, in which the graph ends."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    warnings.warn(
        f"{name} requires a gradient, but raw ops return arrays, through which there is none; use "
        "gradserve.torch.functions, or pass the tensor's detach()",
        UserWarning,
        stacklevel=depth_in_package(),
    )


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
    if arguments["name"] is not None:
        as_text(arguments["name"], Argument("name"))
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
        if getattr(value, "requires_grad", False) is True:
            warn_of_graph(f"{tensor.name} of {op.name}")
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
