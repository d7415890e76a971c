"""BatchNormLayerService: decode, call the domain, encode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradserve.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve.v1 import layer_pb2, tensor_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve.wire.dtypes import to_dtype
from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, request_fields
from gradserve_server.layers.batch_norm.calls import ForwardCall
from gradserve_server.layers.batch_norm.given import open_variables
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.ops.inputs import open_inputs
from gradserve_server.ops.runner import arrays_of
from gradserve_server.resources import DEFAULT_CONTAINER
from gradserve_server.rpc.batch_norm_layers.messages import (
    IMPLEMENTATION_CODES,
    MAX_VARIABLES,
    decode_config,
    decode_key,
    decode_reuse,
    decode_variables,
    encode_ignored,
    encode_info,
)
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.lifetimes import decode_lifetime
from gradserve_server.rpc.boundary.paging import page_of
from gradserve_server.rpc.gradient_ops.calls import decode_inputs
from gradserve_server.rpc.tensors.messages import MAX_COMPONENTS, Placer, check_count, decode_duration
from gradserve_server.tensors.opening import TensorOpener
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.store import TensorStore


class BatchNormLayerServicer:
    """Serves the layers of a registry. The protos say what each method does."""

    def __init__(
        self,
        registry: LayerRegistry,
        store: TensorStore,
        opener: TensorOpener,
        residence: Residence,
        placer: Placer,
    ) -> None:
        self._registry = registry
        self._store = store
        self._opener = opener
        self._residence = residence
        self._placer = placer

    async def CreateBatchNormLayer(
        self, request: messages_pb2.CreateBatchNormLayerRequest, call: Call
    ) -> messages_pb2.CreateBatchNormLayerResponse:
        key, reuse = decode_key(request.layer), decode_reuse(request.reuse)
        lifetime = decode_lifetime(request.lifetime)
        config = await decode_config(request.config, self._opener)
        with request_fields({"activation_fn": "config.activation_fn", "inputs": "input_shape"}):
            if request.input_dtype or request.input_shape:
                build = (_decode_dtype(request.input_dtype), request.input_shape, lifetime)
                layer, created = await self._registry.create_built(key, config, reuse, request.creation_id, *build)
            else:
                layer, created = self._registry.create(key, config, reuse, request.creation_id, lifetime)
        return messages_pb2.CreateBatchNormLayerResponse(info=encode_info(key, layer, lifetime), created=created)

    async def DescribeBatchNormLayer(
        self, request: messages_pb2.DescribeBatchNormLayerRequest, call: Call
    ) -> messages_pb2.DescribeBatchNormLayerResponse:
        key = decode_key(request.layer)
        with self._using(request.layer) as layer:
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
        )
        return messages_pb2.ListBatchNormLayersResponse(
            layers=[encode_info(key, layer, self._registry.lifetime(key)) for key, layer in found[: page.size]],
            next_page_token=page.next_token([key.name for key, _ in found]),
        )

    async def DeleteBatchNormLayer(
        self, request: messages_pb2.DeleteBatchNormLayerRequest, call: Call
    ) -> messages_pb2.DeleteBatchNormLayerResponse:
        deleted = self._registry.delete(decode_key(request.layer), request.layer.incarnation)
        return messages_pb2.DeleteBatchNormLayerResponse(deleted=deleted)

    async def BatchNormForward(self, request: messages_pb2.BatchNormForwardRequest, call: Call) -> WithContents:
        with self._using(request.layer) as layer:
            self._placer.check(request.placement)
            check_count(request.released_forward_ids, MAX_COMPONENTS, "forwards", "released_forward_ids")
            forward = ForwardCall(
                is_training=request.is_training if request.HasField("is_training") else True,
                forward_id=request.forward_id,
                keep_for_backward=request.keep_for_backward if request.HasField("keep_for_backward") else None,
                lease=self._store.lease_seconds(decode_duration(request, "lease")),
                released=request.released_forward_ids,
            )
            contents = Contents()
            with open_inputs(self._opener, decode_inputs(request, CallInputs), CallInputs) as opened:
                keep = self._placer.keeps(opened.inputs.inputs.nbytes, request.placement)
                # What is kept of the forward refers to its inputs too.
                opened.tensors.share()
                with self._delivery(request.placement, contents, keep=keep, shared=True) as delivery:
                    result = await layer.forward(opened.inputs, forward, on_host=not keep, deliver=delivery.add)
                opened.tensors.relocate(result.moved)
            (outputs,) = delivery.tensors
            drawn_scale, drawn_bias = (None, None) if result.drawn is None else map(contents.tensor, result.drawn)
            response = messages_pb2.BatchNormForwardResponse(
                outputs=outputs,
                forward_id=result.forward_id,
                has_pending_updates=result.has_pending_updates,
                implementation=IMPLEMENTATION_CODES[result.implementation],
                regularization_losses=result.regularization_losses,
                warnings=encode_ignored(result.ignored),
                drawn_adjustment_scale=drawn_scale,
                drawn_adjustment_bias=drawn_bias,
            )
            return WithContents(response, contents)

    async def BatchNormBackward(self, request: messages_pb2.BatchNormBackwardRequest, call: Call) -> WithContents:
        with self._using(request.layer) as layer:
            self._placer.check(request.placement)
            contents = Contents()
            with open_inputs(self._opener, decode_inputs(request, _OutputsGradient), _OutputsGradient) as opened:
                backward = layer.check_backward(request.forward_id, opened.inputs.outputs_gradient)
                keep = self._placer.keeps(backward.checked.output_bytes, request.placement)
                with self._delivery(request.placement, contents, keep=keep, shared=False) as delivery:
                    computed = await layer.backward(
                        backward,
                        retain=request.retain_forward,
                        on_host=not keep,
                        deliver=lambda gradients: delivery.add(*arrays_of(gradients).values()),
                    )
                opened.tensors.relocate(computed.moved)
            names = arrays_of(computed.outputs)
            response = messages_pb2.BatchNormBackwardResponse(**dict(zip(names, delivery.tensors, strict=True)))
            return WithContents(response, contents)

    async def ReleaseBatchNormForwards(
        self, request: messages_pb2.ReleaseBatchNormForwardsRequest, call: Call
    ) -> messages_pb2.ReleaseBatchNormForwardsResponse:
        with self._using(request.layer) as layer:
            check_count(request.forward_ids, MAX_COMPONENTS, "forwards", "forward_ids")
            return messages_pb2.ReleaseBatchNormForwardsResponse(
                num_released=layer.forwards.release(request.forward_ids, with_updates=not request.keep_updates)
            )

    async def RunBatchNormUpdates(
        self, request: messages_pb2.RunBatchNormUpdatesRequest, call: Call
    ) -> messages_pb2.RunBatchNormUpdatesResponse:
        check_count(request.forward_ids, MAX_COMPONENTS, "forwards", "forward_ids")
        if request.WhichOneof("target") == "collection":
            collection = request.collection
            if not collection.name:
                raise InvalidArgumentError(
                    "expected the name of a collection, got an empty one", field="collection.name"
                )
            container = collection.container or DEFAULT_CONTAINER
            count = await self._registry.run_updates(container, collection.name, request.forward_ids)
        else:
            with self._using(request.layer) as layer:
                count = await layer.run_updates(request.forward_ids)
        return messages_pb2.RunBatchNormUpdatesResponse(num_run=count)

    async def GetBatchNormVariables(
        self, request: messages_pb2.GetBatchNormVariablesRequest, call: Call
    ) -> WithContents:
        with self._using(request.layer) as layer:
            self._placer.check(request.placement)
            check_count(request.names, MAX_VARIABLES, "names", "names")
            variables = layer.get_variables(request.names)
            arrays = list(variables.values())
            keep = self._placer.keeps(sum(array.nbytes for array in arrays), request.placement)
            if not keep:
                arrays = await self._residence.copy_to_host(arrays)
            contents = Contents()
            placed = self._placer.place(arrays, request.placement, contents, shared=True, keep=keep)
            response = messages_pb2.GetBatchNormVariablesResponse(
                variables=[
                    layer_pb2.NamedTensor(name=name, tensor=tensor)
                    for name, tensor in zip(variables, placed, strict=True)
                ]
            )
            return WithContents(response, contents)

    async def SetBatchNormVariables(
        self, request: messages_pb2.SetBatchNormVariablesRequest, call: Call
    ) -> messages_pb2.SetBatchNormVariablesResponse:
        with (
            self._using(request.layer) as layer,
            open_variables(self._opener, decode_variables(request.variables)) as values,
        ):
            await layer.set_variables(values)
        return messages_pb2.SetBatchNormVariablesResponse()

    @contextmanager
    def _delivery(
        self, placement: tensor_pb2.Placement, contents: Contents, *, keep: bool, shared: bool
    ) -> Iterator["_Delivery"]:
        """Collects results; those that are stored are deleted if the call fails after all."""
        delivery = _Delivery(
            partial(self._placer.place, placement=placement, contents=contents, shared=shared, keep=keep)
        )
        try:
            yield delivery
        except BaseException:
            if keep:
                self._store.delete([tensor.handle for tensor in delivery.tensors])
            raise

    def _using(self, ref: batch_norm_pb2.BatchNormLayerRef) -> AbstractContextManager[BatchNormLayer]:
        return self._registry.use(decode_key(ref), ref.incarnation)


class _Delivery:
    """The messages of results that were placed."""

    def __init__(self, place: Callable[[Sequence[Array]], list[tensor_pb2.Tensor]]) -> None:
        self._place = place
        self.tensors: list[tensor_pb2.Tensor] = []

    def add(self, *arrays: Array) -> None:
        self.tensors += self._place(arrays)


@dataclass(frozen=True)
class _OutputsGradient:
    """The one input of a backward that comes with the request."""

    outputs_gradient: Array


def _decode_dtype(data_type: tensor_pb2.DataType) -> np.dtype[Any]:
    try:
        return to_dtype(data_type)
    except ValueError as error:
        raise InvalidArgumentError(str(error), field="input_dtype") from None
