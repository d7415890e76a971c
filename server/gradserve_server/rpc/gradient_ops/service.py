"""GradientOpsService: decode, run the op, encode."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from gradserve.v1 import gradient_ops_service_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve_server.ops.inputs import open_inputs
from gradserve_server.ops.operation import AnyOp
from gradserve_server.ops.runner import OpRunner, arrays_of, check_call
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.gradient_ops.calls import decode_attributes, decode_inputs, encode_response
from gradserve_server.rpc.tensors.messages import Placer
from gradserve_server.tensors.opening import TensorOpener

SERVICE = gradient_ops_service_pb2.DESCRIPTOR.services_by_name["GradientOpsService"]


class GradientOpsServicer:
    """Serves ops. The protos say what each does."""

    def __init__(self, ops: Mapping[str, AnyOp], runner: OpRunner, opener: TensorOpener, placer: Placer) -> None:
        """Has a method for each RPC of the service, which runs the op of that name.

        Args:
            ops: By name.
            runner: Runs them.
            opener: Opens what requests refer to.
            placer: Puts outputs where requests want them.
        """
        self._runner = runner
        self._opener = opener
        self._placer = placer
        for method in SERVICE.methods:
            response = message_factory.GetMessageClass(method.output_type)
            setattr(self, method.name, partial(self._run, ops[method.name], response))

    async def _run(self, op: AnyOp, response: type[Message], request: Any, call: Call) -> WithContents:
        attributes = decode_attributes(request, op.attributes)
        self._placer.check(request.placement)
        with open_inputs(self._opener, decode_inputs(request, op.inputs), op.inputs) as opened:
            checked = check_call(op, opened.inputs, attributes)
            keep = self._placer.keeps(checked.output_bytes, request.placement)
            computed = await self._runner.run(checked, on_host=not keep)
            opened.tensors.relocate(computed.moved)
        outputs = arrays_of(computed.outputs)
        contents = Contents()
        placed = self._placer.place(list(outputs.values()), request.placement, contents, shared=False, keep=keep)
        tensors = dict(zip(outputs, placed, strict=True))
        return WithContents(encode_response(response, computed.outputs, tensors), contents)
