"""What belongs to one identity is out of another's reach, even if every id is known."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as accumulators_pb2
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as layers_pb2
from gradserve_protocol.v1 import lease_messages_pb2 as leases_pb2
from gradserve_protocol.v1 import tensor_messages_pb2 as tensors_pb2
from gradserve_protocol.v1 import tensor_pb2
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls

Connect = Callable[[str], gradserve.Client]
ONES = np.ones(3, np.float32)


@pytest.fixture(params=["grpc", "shared_memory", "bulk"])
def as_identity(guarded: LocalServer, request: pytest.FixtureRequest) -> Iterator[Connect]:
    clients = []

    def connect(identity: str) -> gradserve.Client:
        clients.append(
            gradserve.connect(
                guarded.address, token=TOKENS[identity], timeout=PATIENCE_SECONDS, transport=request.param
            )
        )
        return clients[-1]

    yield connect
    for each in clients:
        each.close()


def test_a_handle_is_its_owners_alone(as_identity: Connect) -> None:
    worker, colleague = as_identity("worker"), as_identity("colleague")
    handle = worker.put(ONES)
    messages = set()
    for release in (False, True):
        with pytest.raises(gradserve.NotFoundError) as raised:
            colleague.get(handle, release=release)
        messages.add(str(raised.value))
    assert colleague.delete(handle) == 0
    assert handle.handle not in {each.handle for each in colleague.list_tensors()}
    np.testing.assert_array_equal(worker.get(handle), ONES)
    assert worker.delete(handle) == 1
    with pytest.raises(gradserve.NotFoundError) as raised:
        worker.get(handle)
    assert messages == {str(raised.value)}


def test_an_admin_of_all_containers_reaches_everything(as_identity: Connect) -> None:
    worker, admin = as_identity("worker"), as_identity("admin")
    handle = worker.put(ONES)
    assert handle.handle in {each.handle for each in admin.list_tensors()}
    np.testing.assert_array_equal(admin.get(handle), ONES)
    assert admin.delete(handle) == 1


def test_stored_gradients_and_kept_averages_belong_to_their_callers(guarded: LocalServer, name: str) -> None:
    creation: Any = accumulators_pb2.CreateAccumulatorRequest()
    creation.accumulator.container, creation.accumulator.name = "team", name
    creation.spec.components.add(dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    put = tensors_pb2.StoreTensorsRequest()
    put.tensors.add(dtype=tensor_pb2.DATA_TYPE_FLOAT32, content=b"\0\0\0\0")
    take = accumulators_pb2.TakeGradientRequest(accumulator=creation.accumulator, num_required=1)
    take.placement.mode = tensor_pb2.Placement.MODE_KEEP
    with (
        RawCalls(guarded.address, TOKENS["chief"]) as chief,
        RawCalls(guarded.address, TOKENS["worker"]) as worker,
        RawCalls(guarded.address, TOKENS["colleague"]) as colleague,
    ):
        chief.call("CreateAccumulator", creation)
        apply: Any = accumulators_pb2.ApplyGradientRequest(accumulator=creation.accumulator)
        (stored,) = worker.call("StoreTensors", put).tensors
        apply.gradient.add().dense.CopyFrom(stored)
        failure = colleague.fail("ApplyGradient", apply)
        assert (failure.code, failure.field) == (grpc.StatusCode.NOT_FOUND, "gradient[0].dense.handle")
        worker.call("ApplyGradient", apply)
        (average,) = chief.call("TakeGradient", take).average.components
        read = tensors_pb2.ReadTensorsRequest(handles=[average.dense.handle])
        for stranger in (worker, colleague):
            assert stranger.fail("ReadTensors", read).code is grpc.StatusCode.NOT_FOUND
            assert stranger.fail("GetTensors", tensors_pb2.GetTensorsRequest(handles=read.handles)).code is (
                grpc.StatusCode.NOT_FOUND
            )
        assert len(chief.call("ReadTensors", read).tensors) == 1
        chief.call("DeleteAccumulator", accumulators_pb2.DeleteAccumulatorRequest(accumulator=creation.accumulator))


def test_a_worker_opens_what_exists_and_creates_nothing(as_identity: Connect, name: str) -> None:
    chief, worker = as_identity("chief"), as_identity("worker")
    creations: tuple[Callable[[gradserve.Client], object], ...] = (
        lambda client: client.conditional_accumulator("float32", (), shared_name=name, container="team"),
        lambda client: client.batch_norm(scope=name, container="team"),
    )
    for create in creations:
        with pytest.raises(gradserve.PermissionDeniedError, match="needs the role chief in the container 'team'"):
            create(worker)
        create(chief)
        create(worker)
    chief.delete_accumulator(name, container="team")
    chief.delete_batch_norm_layer(name, container="team")


def test_private_accumulators_and_layers_are_out_of_reach(as_identity: Connect, guarded: LocalServer) -> None:
    chief = as_identity("chief")
    accumulator = chief.conditional_accumulator("float32", (), container="team")
    layer = chief.batch_norm(container="team")
    ref: Any = {"accumulator": {"container": "team", "name": accumulator.name}}
    layer_ref: Any = {"layer": {"container": "team", "name": layer.name}}
    with RawCalls(guarded.address, TOKENS["visitor"]) as visitor, RawCalls(guarded.address, TOKENS["worker"]) as worker:
        assert visitor.fail("GetAccumulator", accumulators_pb2.GetAccumulatorRequest(**ref)).code.name == (
            "PERMISSION_DENIED"
        )
        found = worker.fail("GetAccumulator", accumulators_pb2.GetAccumulatorRequest(**ref))
        assert (found.code, found.message) == (
            grpc.StatusCode.NOT_FOUND,
            f"no accumulator 'team/{accumulator.name}'",
        )
        found = worker.fail("DescribeBatchNormLayer", layers_pb2.DescribeBatchNormLayerRequest(**layer_ref))
        assert (found.code, found.message) == (grpc.StatusCode.NOT_FOUND, f"no layer 'team/{layer.name}'")
        listed = worker.call("ListAccumulators", accumulators_pb2.ListAccumulatorsRequest(container="team"))
        assert accumulator.name not in {each.accumulator.name for each in listed.accumulators}
        layers = worker.call("ListBatchNormLayers", layers_pb2.ListBatchNormLayersRequest(container="team"))
        assert layer.name not in {each.layer.name for each in layers.layers}
    assert accumulator.name in {each.name for each in chief.list_accumulators(container="team")}


def test_nobody_ends_the_lease_of_anothers_client(guarded: LocalServer, name: str) -> None:
    creation: Any = accumulators_pb2.CreateAccumulatorRequest()
    creation.accumulator.container, creation.accumulator.name = "team", name
    creation.spec.components.add(dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    creation.lifetime.owner_client_id = "chief-client"
    end = leases_pb2.EndClientLeaseRequest(client_id="chief-client")
    with RawCalls(guarded.address, TOKENS["chief"]) as chief, RawCalls(guarded.address, TOKENS["worker"]) as worker:
        chief.call("CreateAccumulator", creation)
        assert worker.call("EndClientLease", end).num_deleted == 0
        guess = leases_pb2.EndClientLeaseRequest(client_id="chief/chief-client")
        assert worker.call("EndClientLease", guess).num_deleted == 0
        with RawCalls(guarded.address, TOKENS["admin"]) as admin:
            assert admin.call(
                "GetAccumulator", accumulators_pb2.GetAccumulatorRequest(accumulator=creation.accumulator)
            )
        assert chief.call("EndClientLease", end).num_deleted == 1


def test_the_ids_of_one_identitys_calls_are_not_anothers(guarded: LocalServer, name: str) -> None:
    creation: Any = accumulators_pb2.CreateAccumulatorRequest()
    creation.accumulator.container, creation.accumulator.name = "team", name
    creation.spec.components.add(dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    apply: Any = accumulators_pb2.ApplyGradientRequest(accumulator=creation.accumulator)
    apply.request_id.client_id, apply.request_id.sequence = "the same", 1
    apply.gradient.add().dense.CopyFrom(tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, content=b"\0\0\0\0"))
    with (
        RawCalls(guarded.address, TOKENS["chief"]) as chief,
        RawCalls(guarded.address, TOKENS["worker"]) as worker,
        RawCalls(guarded.address, TOKENS["colleague"]) as colleague,
    ):
        chief.call("CreateAccumulator", creation)
        answers = [each.call("ApplyGradient", apply).duplicate for each in (worker, worker, colleague, colleague)]
        assert answers == [False, True, False, True]
        count = accumulators_pb2.GetNumAccumulatedRequest(accumulator=creation.accumulator)
        assert chief.call("GetNumAccumulated", count).num_accumulated == 2
        # Anybody else's other content under the same id is no conflict either.
        apply.weight = 3.0
        assert chief.call("ApplyGradient", apply).duplicate is False
        chief.call("DeleteAccumulator", accumulators_pb2.DeleteAccumulatorRequest(accumulator=creation.accumulator))


def test_a_forward_is_its_callers_alone(as_identity: Connect, name: str) -> None:
    chief, worker, colleague = as_identity("chief"), as_identity("worker"), as_identity("colleague")
    created = chief.batch_norm(scope=name, container="team")
    mine, others = (each.batch_norm(scope=name, container="team") for each in (worker, colleague))
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    forward = mine.forward(x)
    assert forward.forward_id is not None
    assert others.release(forward) == 0
    with pytest.raises(gradserve.NotFoundError, match="no forward"):
        others.backward(np.ones_like(x), forward)
    mine.backward(np.ones_like(x), forward)
    # Updates are the chief's, whoever computed the forwards.
    assert created.run_updates([forward]) == 1
    chief.delete_batch_norm_layer(name, container="team")


def test_a_ticket_and_its_connection_are_bound_to_who_asked(guarded: LocalServer) -> None:
    ticket = issue_ticket(guarded.address, token=TOKENS["worker"])
    with FrameClient.over_unix(ticket) as socket:
        assert socket.hello(ticket.ticket).header.code == 0
        with RawCalls(guarded.address, TOKENS["colleague"]) as colleague:
            put = tensors_pb2.StoreTensorsRequest()
            put.tensors.add(dtype=tensor_pb2.DATA_TYPE_FLOAT32, content=b"\0\0\0\0")
            (stored,) = colleague.call("StoreTensors", put).tensors
        read = tensors_pb2.ReadTensorsRequest(handles=[stored.handle])
        socket.call("TensorService.ReadTensors", read)
        assert socket.receive().header.code == grpc.StatusCode.NOT_FOUND.value[0]
