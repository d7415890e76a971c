"""GradientOpsService: decode, run the op, encode."""

from typing import Any

from google.protobuf.message import Message

from gradserve.v1 import cudnn_rnn_messages_pb2 as cudnn_rnn_pb2
from gradserve.v1 import fused_batch_norm_messages_pb2 as batch_norm_pb2
from gradserve.v1 import gru_block_cell_messages_pb2 as gru_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve_server.ops.batch_norm.declaration import FUSED_BATCH_NORM, FUSED_BATCH_NORM_GRAD
from gradserve_server.ops.cudnn_rnn.canonical import (
    CUDNN_RNN_CANONICAL_TO_PARAMS,
    CUDNN_RNN_PARAMS_SIZE,
    CUDNN_RNN_PARAMS_TO_CANONICAL,
)
from gradserve_server.ops.cudnn_rnn.declaration import CUDNN_RNN, CUDNN_RNN_BACKPROP
from gradserve_server.ops.gru.declaration import GRU_BLOCK_CELL, GRU_BLOCK_CELL_GRAD
from gradserve_server.ops.inputs import open_inputs
from gradserve_server.ops.operation import Op
from gradserve_server.ops.runner import OpRunner, arrays_of, check_call
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.gradient_ops.calls import decode_attributes, decode_inputs, encode_response
from gradserve_server.rpc.tensors.messages import Placer
from gradserve_server.tensors.opening import TensorOpener


class GradientOpsServicer:
    """Serves ops. The protos say what each method does."""

    def __init__(self, runner: OpRunner, opener: TensorOpener, placer: Placer) -> None:
        self._runner = runner
        self._opener = opener
        self._placer = placer

    async def FusedBatchNorm(self, request: batch_norm_pb2.FusedBatchNormRequest, call: Call) -> WithContents:
        return await self._run(FUSED_BATCH_NORM, request, batch_norm_pb2.FusedBatchNormResponse)

    async def FusedBatchNormGrad(self, request: batch_norm_pb2.FusedBatchNormGradRequest, call: Call) -> WithContents:
        return await self._run(FUSED_BATCH_NORM_GRAD, request, batch_norm_pb2.FusedBatchNormGradResponse)

    async def GRUBlockCell(self, request: gru_pb2.GRUBlockCellRequest, call: Call) -> WithContents:
        return await self._run(GRU_BLOCK_CELL, request, gru_pb2.GRUBlockCellResponse)

    async def GRUBlockCellGrad(self, request: gru_pb2.GRUBlockCellGradRequest, call: Call) -> WithContents:
        return await self._run(GRU_BLOCK_CELL_GRAD, request, gru_pb2.GRUBlockCellGradResponse)

    async def CudnnRNN(self, request: cudnn_rnn_pb2.CudnnRNNRequest, call: Call) -> WithContents:
        return await self._run(CUDNN_RNN, request, cudnn_rnn_pb2.CudnnRNNResponse)

    async def CudnnRNNBackprop(self, request: cudnn_rnn_pb2.CudnnRNNBackpropRequest, call: Call) -> WithContents:
        return await self._run(CUDNN_RNN_BACKPROP, request, cudnn_rnn_pb2.CudnnRNNBackpropResponse)

    async def CudnnRNNParamsSize(self, request: cudnn_rnn_pb2.CudnnRNNParamsSizeRequest, call: Call) -> WithContents:
        return await self._run(CUDNN_RNN_PARAMS_SIZE, request, cudnn_rnn_pb2.CudnnRNNParamsSizeResponse)

    async def CudnnRNNCanonicalToParams(
        self, request: cudnn_rnn_pb2.CudnnRNNCanonicalToParamsRequest, call: Call
    ) -> WithContents:
        response = cudnn_rnn_pb2.CudnnRNNCanonicalToParamsResponse
        return await self._run(CUDNN_RNN_CANONICAL_TO_PARAMS, request, response)

    async def CudnnRNNParamsToCanonical(
        self, request: cudnn_rnn_pb2.CudnnRNNParamsToCanonicalRequest, call: Call
    ) -> WithContents:
        response = cudnn_rnn_pb2.CudnnRNNParamsToCanonicalResponse
        return await self._run(CUDNN_RNN_PARAMS_TO_CANONICAL, request, response)

    async def _run(self, op: Op[Any, Any, Any, Any], request: Any, response: type[Message]) -> WithContents:
        attributes = decode_attributes(request, op.attributes)
        self._placer.check(request.placement)
        with open_inputs(self._opener, decode_inputs(request, op.inputs), op.inputs) as opened:
            call = check_call(op, opened.inputs, attributes)
            keep = self._placer.keeps(call.output_bytes, request.placement)
            computed = await self._runner.run(call, on_host=not keep)
            opened.tensors.relocate(computed.moved)
        outputs = arrays_of(computed.outputs)
        contents = Contents()
        placed = self._placer.place(list(outputs.values()), request.placement, contents, shared=False, keep=keep)
        tensors = dict(zip(outputs, placed, strict=True))
        return WithContents(encode_response(response, computed.outputs, tensors), contents)
