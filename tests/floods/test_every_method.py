"""Every method with the largest input that it takes, in small: it leaves others their turns."""

from collections.abc import AsyncIterator
from typing import Any

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layer_pb2
from gradserve_protocol.v1 import (
    cudnn_rnn_messages_pb2,
    lease_messages_pb2,
    lease_pb2,
    status_messages_pb2,
    tensor_messages_pb2,
    tensor_pb2,
)
from tests.bad_input.layer_tables import config, create_request, forward_request, layer
from tests.bad_input.requests import Create, component, ref, spec, zeros
from tests.bad_input.test_streams import header
from tests.floods.servicers import CALL, PARTS, Servicers
from tests.floods.test_components import KEEP
from tests.servers.raw_calls import METHODS

WITH_COMPONENTS = {
    "CreateAccumulator",
    "GetAccumulator",
    "ListAccumulators",
    "ApplyGradient",
    "TakeGradient",
    "ReadAverage",
    "ReduceGradients",
    "StageGradient",
    "EndEpoch",
    "ForgetGradients",
    "PushPull",
    "PutTensors",
    "StoreTensors",
    "ReadTensors",
    "DeleteTensors",
    "StageUpdate",
    "CountUpdates",
    "ForgetUpdates",
    "CreateParameters",
    "GetParameters",
    "ListParameters",
    "ReadParameters",
    "Push",
    "PushPullParameters",
    "ChangeParameters",
    "ListRounds",
    "ReportEvaluation",
    "ListEvaluations",
    "ForkParameters",
}
"""Methods that `test_components`, `test_parameters` and `test_sharding` call."""
WITHOUT_LISTS = {
    "DeleteAccumulator",
    "DeleteParameters",
    "GetNumAccumulated",
    "SetGlobalStep",
    "DescribeBatchNormLayer",
    "DeleteBatchNormLayer",
    "BatchNormForward",
    "BatchNormBackward",
    "GetBatchNormVariables",
    "SetBatchNormVariables",
    "HoldClientLease",
    "GetLog",
    "GetServerInfo",
    "IssueTicket",
    "CudnnRNNParamsSize",
    *(f"{name}{gradient}" for name in ("FusedBatchNorm", "LayerNorm") for gradient in ("", "Grad")),
    *("GRUBlockCell", "GRUBlockCellGrad", "CudnnRNN", "CudnnRNNBackprop"),
}
"""Methods whose inputs have a few parts, however large these are: arrays are computed with in threads."""


async def test_layers(servicers: Servicers) -> None:
    async def call(method: str, request: Any) -> Any:
        return await servicers.call(method, request, "BatchNormLayerService")

    tags = [f"tag {number}" for number in range(1000)]
    for number in range(3):
        name = f"layer {number}"
        await call("CreateBatchNormLayer", create_request(name, config=config(updates_collections=tags)))
    await call("ListBatchNormLayers", layer_pb2.ListBatchNormLayersRequest())
    await call("BatchNormForward", forward_request("layer 0", forward_id="0"))
    ids = [str(number) for number in range(PARTS)]
    run = layer_pb2.RunBatchNormUpdatesRequest(layer=layer("layer 0"), forward_ids=ids)
    await call("RunBatchNormUpdates", run)
    released = await call(
        "ReleaseBatchNormForwards", layer_pb2.ReleaseBatchNormForwardsRequest(layer=layer("layer 0"), forward_ids=ids)
    )
    assert released.num_released == 1


async def test_parameters_of_many_layers(servicers: Servicers) -> None:
    sizes: dict[str, Any] = {"num_layers": PARTS // 16, "num_units": 1, "input_size": 1, "rnn_mode": "lstm"}
    parts = [zeros(1)] * (sizes["num_layers"] * 8)
    await servicers.call(
        "CudnnRNNCanonicalToParams",
        cudnn_rnn_messages_pb2.CudnnRNNCanonicalToParamsRequest(weights=parts, biases=parts, **sizes),
        "GradientOpsService",
    )
    params = tensor_pb2.Tensor(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2 * len(parts)], content=bytes(4 * 2 * len(parts))
    )
    request = cudnn_rnn_messages_pb2.CudnnRNNParamsToCanonicalRequest(
        params=params, num_params_weights=len(parts), num_params_biases=len(parts), placement=KEEP, **sizes
    )
    split = (await servicers.call("CudnnRNNParamsToCanonical", request, "GradientOpsService")).message
    assert len(split.weights) == len(split.biases) == len(parts)


async def test_what_a_client_owns(servicers: Servicers) -> None:
    lifetime = lease_pb2.Lifetime(owner_client_id="a")
    for number in range(PARTS // 10):
        request = Create(accumulator=ref(f"a{number}"), spec=spec(component()), lifetime=lifetime)
        await servicers.call("CreateAccumulator", request)
    await servicers.call("EndClientLease", lease_messages_pb2.EndClientLeaseRequest(client_id="a"), "LeaseService")
    left = await servicers.call("ListAccumulators", messages_pb2.ListAccumulatorsRequest())
    assert not left.accumulators


async def test_a_picture_of_many_accumulators(servicers: Servicers) -> None:
    for number in range(PARTS // 2):
        await servicers.call("CreateAccumulator", Create(accumulator=ref(f"b{number}"), spec=spec(component())))
    request = status_messages_pb2.GetServerStatusRequest(max_accumulators=1000)
    picture = await servicers.call("GetServerStatus", request, "ServerService")
    assert (picture.num_accumulators, len(picture.accumulators)) == (PARTS // 2, 1000)


async def test_streams(servicers: Servicers) -> None:
    async def upload() -> AsyncIterator[Any]:
        yield header(*[[0]] * PARTS)

    handles = (await servicers.call("PutTensors", upload(), "TensorService")).tensors
    listed = await servicers.call(
        "ListTensors", tensor_messages_pb2.ListTensorsRequest(page_size=PARTS), "TensorService"
    )
    assert listed.tensors
    reading = tensor_messages_pb2.GetTensorsRequest(handles=[each.handle for each in handles])

    async def read() -> list[Any]:
        servicer: Any = servicers.of("TensorService")
        return [each async for each in servicer.GetTensors(reading, CALL)]

    (answer,) = await servicers.measure("GetTensors", read())
    header_sent = tensor_messages_pb2.GetTensorsResponse.FromString(answer.SerializeToString()).header
    assert len(header_sent.tensors) == PARTS


def test_every_method_is_here_or_has_no_lists() -> None:
    called = {
        "CreateBatchNormLayer",
        "ListBatchNormLayers",
        "RunBatchNormUpdates",
        "ReleaseBatchNormForwards",
        "CudnnRNNCanonicalToParams",
        "CudnnRNNParamsToCanonical",
        "EndClientLease",
        "ListTensors",
        "GetTensors",
        "GetServerStatus",
    }
    assert called | WITH_COMPONENTS | WITHOUT_LISTS == set(METHODS)
    assert not called & WITHOUT_LISTS
