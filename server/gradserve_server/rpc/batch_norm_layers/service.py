"""The servicer of BatchNormLayerService: decodes requests, calls the domain and encodes responses."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.limits import MAX_FORWARDS, check_count
from gradserve_server.ops.runner import OpenInputs, arrays_of, open_inputs
from gradserve_server.resources.registry import DEFAULT_CONTAINER
from gradserve_server.rpc.batch_norm_layers.codec import (
    MAX_VARIABLES,
    decode_collection,
    decode_config,
    decode_forward,
    decode_input_dtype,
    decode_key,
    decode_reuse,
    decode_variables,
    encode_forward,
    encode_gradients,
    encode_info,
    encode_variables,
    num_parts,
)
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.fields import decode_lifetime, page_of
from gradserve_server.rpc.tensors.messages import OutgoingTensors, TensorDeliverer, decode_inputs
from gradserve_server.runtime.event_loop import InTurns
from gradserve_server.tensors.incoming import IncomingTensors, TensorOpener


@dataclass(frozen=True)
class OutputsGradient:
    """The only input of a backward in a request."""

    outputs_gradient: Array


class BatchNormLayerServicer:
    """Serves the layers of a registry. The protos specify each method."""

    def __init__(
        self,
        registry: LayerRegistry,
        opener: TensorOpener,
        deliverer: TensorDeliverer,
        lease_seconds: Callable[[float | None], float],
    ) -> None:
        """`lease_seconds` returns the lease to grant for a requested one."""
        self._registry = registry
        self._lease_seconds = lease_seconds
        self._opener = opener
        self._deliverer = deliverer

    async def CreateBatchNormLayer(
        self, request: messages_pb2.CreateBatchNormLayerRequest, call: Call
    ) -> messages_pb2.CreateBatchNormLayerResponse:
        key, reuse = decode_key(request.layer, call.identity), decode_reuse(request.reuse)
        lifetime = decode_lifetime(request.lifetime, call.identity)
        config = await decode_config(request.config, self._opener, call.payload, call.identity)
        if call.may_only_open is not None and not self._registry.has(key):
            raise call.may_only_open
        with request_fields({"activation_fn": "config.activation_fn", "inputs": "input_shape"}):
            if request.input_dtype or request.input_shape:
                build = (decode_input_dtype(request.input_dtype), request.input_shape, lifetime)
                layer, created = await self._registry.create_built(key, config, reuse, request.creation_id, *build)
            else:
                layer, created = self._registry.create(key, config, reuse, request.creation_id, lifetime)
        await self._registry.settle()
        return messages_pb2.CreateBatchNormLayerResponse(info=encode_info(key, layer, lifetime), created=created)

    async def DescribeBatchNormLayer(
        self, request: messages_pb2.DescribeBatchNormLayerRequest, call: Call
    ) -> messages_pb2.DescribeBatchNormLayerResponse:
        key = decode_key(request.layer, call.identity)
        with self._using(request.layer, call) as layer:
            info = encode_info(key, layer, self._registry.lifetime(key), request.collection)
        return messages_pb2.DescribeBatchNormLayerResponse(info=info)

    async def ListBatchNormLayers(
        self, request: messages_pb2.ListBatchNormLayersRequest, call: Call
    ) -> messages_pb2.ListBatchNormLayersResponse:
        page = page_of(request.page_size, request.page_token, default_size=100)
        found = self._registry.page(
            request.container or DEFAULT_CONTAINER,
            page.after,
            page.size + 1,
            scope=request.scope,
            collection=request.collection,
            user=call.identity,
        )
        shown = page.filled(found, lambda entry: num_parts(entry[1]))
        return messages_pb2.ListBatchNormLayersResponse(
            layers=[encode_info(key, layer, self._registry.lifetime(key)) for key, layer in shown],
            next_page_token=page.next_token(shown[-1][0].name if shown else "", is_last=len(shown) == len(found)),
        )

    async def DeleteBatchNormLayer(
        self, request: messages_pb2.DeleteBatchNormLayerRequest, call: Call
    ) -> messages_pb2.DeleteBatchNormLayerResponse:
        deleted = self._registry.delete(decode_key(request.layer, call.identity), request.layer.incarnation)
        await self._registry.settle()
        return messages_pb2.DeleteBatchNormLayerResponse(deleted=deleted)

    async def BatchNormForward(self, request: messages_pb2.BatchNormForwardRequest, call: Call) -> WithContents:
        with self._using(request.layer, call) as layer, self._deliverer.begin(request.placement, call) as outgoing:
            forward = decode_forward(request, self._lease_seconds, call.identity)
            inputs = decode_inputs(request, CallInputs, call.payload, call.identity)
            async with open_inputs(self._opener, inputs, CallInputs) as opened:
                result = await deliver_forward(layer, opened, forward, outgoing)
            return await encode_forward(result, outgoing)

    async def BatchNormBackward(self, request: messages_pb2.BatchNormBackwardRequest, call: Call) -> WithContents:
        forward_id, retain = call.identity.own(request.forward_id), request.retain_forward
        with self._using(request.layer, call) as layer, self._deliverer.begin(request.placement, call) as outgoing:
            inputs = decode_inputs(request, OutputsGradient, call.payload, call.identity)
            async with open_inputs(self._opener, inputs, OutputsGradient) as opened:
                names = await deliver_backward(layer, opened, forward_id, outgoing, retain=retain)
            return await encode_gradients(names, outgoing)

    async def ReleaseBatchNormForwards(
        self, request: messages_pb2.ReleaseBatchNormForwardsRequest, call: Call
    ) -> messages_pb2.ReleaseBatchNormForwardsResponse:
        with self._using(request.layer, call) as layer:
            check_count(request.forward_ids, MAX_FORWARDS, "forwards", "forward_ids")
            forward_ids = [call.identity.own(each) async for each in InTurns(request.forward_ids)]
            count = await layer.release(forward_ids, with_updates=not request.keep_updates)
        return messages_pb2.ReleaseBatchNormForwardsResponse(num_released=count)

    async def RunBatchNormUpdates(
        self, request: messages_pb2.RunBatchNormUpdatesRequest, call: Call
    ) -> messages_pb2.RunBatchNormUpdatesResponse:
        check_count(request.forward_ids, MAX_FORWARDS, "forwards", "forward_ids")
        forward_ids = [call.identity.named(each) async for each in InTurns(request.forward_ids)]
        if request.WhichOneof("target") == "collection":
            container, collection = decode_collection(request.collection)
            count = await self._registry.run_updates(container, collection, forward_ids, user=call.identity)
        else:
            with self._using(request.layer, call) as layer:
                count = await layer.run_updates(forward_ids)
        return messages_pb2.RunBatchNormUpdatesResponse(num_run=count)

    async def GetBatchNormVariables(
        self, request: messages_pb2.GetBatchNormVariablesRequest, call: Call
    ) -> WithContents:
        with self._using(request.layer, call) as layer, self._deliverer.begin(request.placement, call) as outgoing:
            check_count(request.names, MAX_VARIABLES, "names", "names")
            variables = layer.get_variables(request.names)
            await outgoing.add(list(variables.values()), shared=True)
            return await encode_variables(variables, outgoing)

    async def SetBatchNormVariables(
        self, request: messages_pb2.SetBatchNormVariablesRequest, call: Call
    ) -> messages_pb2.SetBatchNormVariablesResponse:
        with self._using(request.layer, call) as layer:
            names, tensors = decode_variables(request.variables, call.payload, call.identity)
            async with open_variables(self._opener, names, tensors) as values:
                await layer.set_variables(values)
        return messages_pb2.SetBatchNormVariablesResponse()

    def _using(self, ref: batch_norm_pb2.BatchNormLayerRef, call: Call) -> AbstractContextManager[BatchNormLayer]:
        return self._registry.use(decode_key(ref, call.identity), ref.incarnation)


async def deliver_forward(
    layer: BatchNormLayer, opened: OpenInputs[CallInputs], call: ForwardCall, outgoing: OutgoingTensors
) -> ForwardResult:
    """Computes a forward, and adds its outputs to a reply; returns its result. Raises what the layer raises."""
    keeps = outgoing.keeps(opened.inputs.inputs.nbytes)
    # The data kept for the backward refers to the inputs.
    opened.tensors.share()
    result = await layer.forward(
        opened.inputs,
        call,
        on_host=not keeps,
        deliver=lambda outputs: outgoing.add([outputs], shared=True),
        room=outgoing.room,
    )
    opened.tensors.relocate(result.moved, outgoing.room)
    return result


async def deliver_backward(
    layer: BatchNormLayer,
    opened: OpenInputs[OutputsGradient],
    forward_id: str,
    outgoing: OutgoingTensors,
    *,
    retain: bool,
) -> list[str]:
    """Computes the gradients of a forward, and adds them to a reply; returns their names.

    Raises what the layer raises.
    """
    checked = layer.check_backward(forward_id, opened.inputs.outputs_gradient)
    computed = await layer.backward(
        checked,
        retain=retain,
        on_host=not outgoing.keeps(checked.checked.output_bytes),
        deliver=lambda gradients: outgoing.add(list(arrays_of(gradients).values())),
        room=outgoing.room,
    )
    opened.tensors.relocate(computed.moved, outgoing.room)
    return list(arrays_of(computed.outputs))


@asynccontextmanager
async def open_variables(
    opener: TensorOpener, names: Sequence[str], tensors: IncomingTensors
) -> AsyncIterator[dict[str, Array]]:
    """Yields values by name for setting variables, which keep referring to the memory of the values.

    Raises:
        InvalidArgumentError: There are no values, or one is malformed or given twice.
        NotFoundError: A handle does not exist.
    """
    if not names:
        raise InvalidArgumentError("expected at least one variable, got none", field="variables")
    known: set[str] = set()
    for index, name in enumerate(names):
        if name in known:
            raise InvalidArgumentError(
                f"expected each variable once, got {name!r} twice", field=f"variables[{index}].name"
            )
        known.add(name)
    async with opener.open(tensors):
        values = dict(zip(names, tensors.arrays().values(), strict=True))
        tensors.share()
        yield values
