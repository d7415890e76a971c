"""GradientOpsService: decodes, runs the op, encodes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from gradserve.v1 import gradient_ops_service_pb2
from gradserve.wire.tensors import Contents, WithContents
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.ops.operation import AnyOp
from gradserve_server.ops.runner import OpRunner, arrays_of, check_call, open_inputs
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.messages import PARTS_AT_ONCE
from gradserve_server.rpc.gradient_ops.calls import (
    decode_attributes,
    decode_inputs,
    encode_response,
    num_parts,
    serialize_response,
)
from gradserve_server.rpc.tensors.messages import decode_placement, each_delivered, encode_delivered
from gradserve_server.tensors.delivery import TensorDeliverer
from gradserve_server.tensors.opening import TensorOpener

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
        """Adds a method for each RPC of the service, which runs the op of that name.

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
        with self._deliverer.begin(decode_placement(request.placement, call)) as delivery:
            work = PIECE_BYTES * num_parts(request, op.inputs)
            inputs = await self._compute.run(work, decode_inputs, request, op.inputs, call.payload, call.identity)
            with open_inputs(self._opener, inputs, op.inputs) as opened:
                checked = await self._compute.run(work, check_call, op, opened.inputs, attributes)
                keeps = delivery.keeps(checked.output_bytes)
                computed = await self._runner.run(checked, on_host=not keeps, room=delivery.room)
                opened.tensors.relocate(computed.moved, delivery.room)
            outputs, contents = arrays_of(computed.outputs), Contents()
            delivered = await delivery.deliver_many(list(outputs.values()), shared=False)
            if len(delivered) <= PARTS_AT_ONCE:
                tensors = dict(zip(outputs, encode_delivered(delivered, contents), strict=True))
                return WithContents(encode_response(response, computed.outputs, tensors), contents)
            # With contents beside it, a message for gRPC could not be serialized in parts.
            many = each_delivered(delivered, contents, beside=delivery.is_attached)
            message = await self._compute.run_in_thread(serialize_response, response, computed.outputs, many)
            return WithContents(message, contents)
