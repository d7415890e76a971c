"""GradientOpsService: decodes a call, runs the op, and encodes its outputs."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import gradient_ops_service_pb2, tensor_pb2
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.limits import MAX_NAME_BYTES, check_length
from gradserve_server.ops.operation import AnyOp
from gradserve_server.ops.runner import OpRunner, arrays_of, check_call, open_inputs
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.messages import Entries, Piece
from gradserve_server.rpc.tensors.messages import TensorDeliverer, decode_inputs
from gradserve_server.tensors.incoming import TensorOpener

AttributesT = TypeVar("AttributesT")
SERVICE = gradient_ops_service_pb2.DESCRIPTOR.services_by_name["GradientOpsService"]


class GradientOpsServicer:
    """Serves ops. The protos say what each does."""

    def __init__(
        self,
        ops: Mapping[str, AnyOp],
        runner: OpRunner,
        opener: TensorOpener,
        deliverer: TensorDeliverer,
        compute: Compute,
    ) -> None:
        """Adds a method for each RPC of the service that runs the op of that name.

        Args:
            ops: The ops by name.
            runner: Runs the ops.
            opener: Opens the tensors of requests.
            deliverer: Delivers outputs where requests want them.
            compute: Decodes and encodes calls of many tensors.
        """
        self._runner = runner
        self._compute = compute
        self._opener = opener
        self._deliverer = deliverer
        for method in SERVICE.methods:
            response = message_factory.GetMessageClass(method.output_type)
            setattr(self, method.name, partial(self._run, ops[method.name], response))

    async def _run(self, op: AnyOp, response: type[Message], request: Any, call: Call) -> WithContents:
        attributes = decode_attributes(request, op.attributes)
        with self._deliverer.begin(request.placement, call) as outgoing:
            work = PIECE_BYTES * num_parts(request, op.inputs)
            inputs = await self._compute.run(work, decode_inputs, request, op.inputs, call.payload, call.identity)
            async with open_inputs(self._opener, inputs, op.inputs) as opened:
                checked = await self._compute.run(work, check_call, op, opened.inputs, attributes)
                keeps = outgoing.keeps(checked.output_bytes)
                computed = await self._runner.run(checked, on_host=not keeps, room=outgoing.room)
                opened.tensors.relocate(computed.moved, outgoing.room)
            await outgoing.add(list(arrays_of(computed.outputs).values()))
            return await outgoing.reply(response(), partial(_pieces, computed.outputs))


def decode_attributes(request: Message, kind: type[AttributesT]) -> AttributesT:
    """Returns the attributes of a request, with defaults for unset ones.

    Raises:
        InvalidArgumentError: A name is too long.
    """
    declared: Any = kind
    given = {field.name: getattr(request, field.name) for field in fields(declared) if _is_set(request, field.name)}
    for name, value in given.items():
        if isinstance(value, str):
            check_length(value, MAX_NAME_BYTES, name)
    return kind(**given)


def _is_set(request: Message, name: str) -> bool:
    """Returns True if a field is set; a string without presence counts as set if it is not empty."""
    if request.DESCRIPTOR.fields_by_name[name].has_presence:
        return request.HasField(name)
    return bool(getattr(request, name))


def num_parts(request: Any, kind: type[Any]) -> int:
    """Returns the number of tensors in the repeated fields of a request."""
    declared = request.DESCRIPTOR.fields_by_name
    return sum(len(getattr(request, field.name)) for field in fields(kind) if declared[field.name].is_repeated)


def _pieces(outputs: Any, tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
    """Yields the fields of the response of an op; the tensors come in the order of `arrays_of`."""
    for field in fields(outputs):
        value = getattr(outputs, field.name)
        if isinstance(value, tuple):
            yield Entries(field.name, islice(tensors, len(value)))
        elif value is not None:
            yield field.name, [next(tensors)]
