"""A BatchNormLayerService that says what a test wants, and the two faces of the client in front of it.

It answers exchanges, not bytes on a network, and computes nothing: it is there for what the client itself decides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from gradserve import TensorHandle
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Background, Download, Exchange, Pause, TimeLimits, Unary, Upload
from gradserve.calls.identity import RequestIds
from gradserve_protocol.tensors import encode_message, to_data_type, to_dtype
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, lease_messages_pb2, tensor_messages_pb2, tensor_pb2
from tests.client.fake_transport import FakeAsyncTransport, FakeTransport
from tests.servers.connecting import aio_client_over, client_over

CHANNELS = 3

X = np.arange(6, dtype=np.float32).reshape(2, 3)
DY = np.ones_like(X)
LARGE = np.zeros((1 << 18, 4), np.float32)
"""Of more than what travels inside a message."""
HANDLE = TensorHandle("mine", np.dtype(np.float32), (2, 3))


def array_of(tensor: Any) -> Any:
    return np.frombuffer(tensor.content, to_dtype(tensor.dtype)).reshape(tuple(tensor.shape))


def inline(array: Any) -> tensor_pb2.Tensor:
    value = np.asarray(array)
    return tensor_pb2.Tensor(dtype=to_data_type(value.dtype), shape=value.shape, content=value.tobytes())


class FakeLayerServer:
    """Remembers the requests, and answers them.

    Attributes:
        requests: All of them as they were on the wire, in their order, with the names of the methods.
        failures: What the next calls of a method end with.
        replies: What is different from the ordinary in the replies of a method.
        stored: The uploaded tensors by handle.
        variables: Those of every layer, with their dtypes.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.failures: dict[str, list[BaseException]] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, Any] = {}
        self.variables: dict[str, str] = {}

    def of(self, method: str) -> list[Any]:
        """Returns the requests of a method."""
        return [request for name, request in self.requests if name == method]

    def last(self, method: str) -> Any:
        """Returns the last request of a method."""
        return self.of(method)[-1]

    def answer(self, exchange: Exchange) -> Any:
        """Carries out an exchange."""
        match exchange:
            case Unary(_, method, request, _):
                message = request if isinstance(request, Message) else request.message
                seen: Any = type(message)()
                seen.ParseFromString(encode_message(request))
                self.requests.append((method, seen))
                if self.failures.get(method):
                    raise self.failures[method].pop(0)
                reply = getattr(self, f"_{method}")(seen)
                reply.MergeFrom(type(reply)(**self.replies.get(method, {})))
                return reply
            case Upload(_, arrays):
                handles = [f"uploaded-{len(self.stored) + index}" for index, _ in enumerate(arrays)]
                self.stored.update(zip(handles, arrays, strict=True))
                return tensor_messages_pb2.PutTensorsResponse(
                    tensors=[tensor_pb2.Tensor(handle=handle) for handle in handles]
                )
            case Download(request, _):
                return [self.stored.pop(handle) for handle in request.handles]
            case Pause(_) | Background(_):
                return None

    def info(self, ref: Any, config: Any = None) -> batch_norm_pb2.BatchNormLayerInfo:
        variables = [
            layer_pb2.VariableInfo(name=name, spec={"dtype": to_data_type(dtype), "shape": [CHANNELS]})
            for name, dtype in self.variables.items()
        ]
        full = batch_norm_pb2.BatchNormLayerRef(
            container=ref.container or "default", name=ref.name, incarnation="first"
        )
        return batch_norm_pb2.BatchNormLayerInfo(layer=full, config=config, variables=variables)

    def _CreateBatchNormLayer(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.CreateBatchNormLayerResponse(info=self.info(request.layer, request.config), created=True)

    def _DescribeBatchNormLayer(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.DescribeBatchNormLayerResponse(info=self.info(request.layer))

    def _ListBatchNormLayers(self, request: Any) -> Message:  # noqa: N802
        name = request.page_token or "a"
        following = {"a": "b", "b": ""}[name]
        layers = [self.info(batch_norm_pb2.BatchNormLayerRef(name=name))]
        return messages_pb2.ListBatchNormLayersResponse(layers=layers, next_page_token=following)

    def _DeleteBatchNormLayer(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.DeleteBatchNormLayerResponse(deleted=True)

    def _BatchNormForward(self, request: Any) -> Message:  # noqa: N802
        outputs = _outputs_for(request.inputs)
        if request.placement.mode == tensor_pb2.Placement.MODE_KEEP:
            outputs = tensor_pb2.Tensor(dtype=outputs.dtype, shape=outputs.shape, handle="kept-outputs")
        return messages_pb2.BatchNormForwardResponse(
            outputs=outputs,
            forward_id=request.forward_id if request.is_training else "",
            has_pending_updates=request.is_training,
            implementation=batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_CORE,
        )

    def _BatchNormBackward(self, request: Any) -> Message:  # noqa: N802
        if request.placement.mode == tensor_pb2.Placement.MODE_KEEP:
            return messages_pb2.BatchNormBackwardResponse(
                inputs_gradient=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], handle="kept")
            )
        return messages_pb2.BatchNormBackwardResponse(inputs_gradient=_outputs_for(request.outputs_gradient))

    def _ReleaseBatchNormForwards(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.ReleaseBatchNormForwardsResponse(num_released=len(request.forward_ids))

    def _RunBatchNormUpdates(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.RunBatchNormUpdatesResponse(num_run=len(request.forward_ids))

    def _GetBatchNormVariables(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.GetBatchNormVariablesResponse(
            variables=[
                layer_pb2.NamedTensor(name=name, tensor=inline(np.full(CHANNELS, index, np.float32)))
                for index, name in enumerate(request.names or ["beta", "moving_mean"])
            ]
        )

    def _SetBatchNormVariables(self, request: Any) -> Message:  # noqa: N802
        return messages_pb2.SetBatchNormVariablesResponse()

    def _EndClientLease(self, request: Any) -> Message:  # noqa: N802
        return lease_messages_pb2.EndClientLeaseResponse()

    def _DeleteTensors(self, request: Any) -> Message:  # noqa: N802
        for handle in request.handles:
            del self.stored[handle]
        return tensor_messages_pb2.DeleteTensorsResponse(num_deleted=len(request.handles))


def _outputs_for(tensor: tensor_pb2.Tensor) -> tensor_pb2.Tensor:
    return inline(np.zeros((2, CHANNELS), np.float32)) if tensor.WhichOneof("data") == "handle" else tensor


def result_of(value: Any) -> Any:
    """Returns what a method of either face returns in the end."""
    if not hasattr(value, "send"):
        return value
    try:
        value.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a fake server keeps nobody waiting")


class Context:
    """Enters and leaves what either face made."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __enter__(self) -> Any:
        enter = getattr(self._made, "__enter__", None) or self._made.__aenter__
        return result_of(enter())

    def __exit__(self, *exception: object) -> None:
        leave = getattr(self._made, "__exit__", None) or self._made.__aexit__
        result_of(leave(*exception))


def _calls() -> ClientCalls:
    return ClientCalls(RequestIds("me"), TimeLimits())


def blocking_client(server: FakeLayerServer) -> Any:
    return client_over(FakeTransport(server.answer), "nowhere:1", ClientCalls(RequestIds("me"), TimeLimits()))


def asyncio_client(server: FakeLayerServer) -> Any:
    return aio_client_over(FakeAsyncTransport(server.answer), "nowhere:1", ClientCalls(RequestIds("me"), TimeLimits()))


FACES: Sequence[Callable[[FakeLayerServer], Any]] = (blocking_client, asyncio_client)


def forward_ids(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormForward")]


def released(server: FakeLayerServer) -> list[list[str]]:
    return [list(request.released_forward_ids) for request in server.of("BatchNormForward")]


def went_back(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormBackward")]
