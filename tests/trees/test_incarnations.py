"""Accumulators that are deleted, and made again, past an aggregator: what it knows of the earlier one is of no use."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from pydantic import ByteSize

from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_messages_pb2, tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_testing import LocalServer
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator

REF = accumulator_pb2.AccumulatorRef(name="net")
FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32


class Tree:
    """A server and an aggregator, and calls as clients make them who name no incarnation.

    Attributes:
        top: Calls at the server.
        near: Calls at the aggregator.
        sent: The incarnations in the names of accumulators that have come to the server, by method.
    """

    def __init__(self, stack: ExitStack, workers: int = 1, grace: float = 30.0, **settings: Any) -> None:
        self.sent: dict[str, set[str]] = defaultdict(set)
        parts = Parts(interceptors=(self,))
        server = stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts))
        self.aggregator = stack.enter_context(aggregator(server.address, workers, grace, **settings))
        self.top = stack.enter_context(RawCalls(server.address))
        self.near = stack.enter_context(RawCalls(self.aggregator.address))
        self._num_calls = 0

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """See `Interceptor`."""

        async def noted(request: Any, call: Call) -> Any:
            if hasattr(request, "accumulator"):
                self.sent[method.name].add(request.accumulator.incarnation)
            return await handle(request, call)

        return noted

    def make(self, calls: RawCalls, size: int = 2, name: str = "net") -> None:
        component = accumulator_pb2.ComponentSpec(
            name="w", dtype=FLOAT32, shape=accumulator_pb2.PartialShape(dims=(size,))
        )
        spec = accumulator_pb2.AccumulatorSpec(components=[component])
        ref = accumulator_pb2.AccumulatorRef(name=name)
        calls.call("CreateAccumulator", messages_pb2.CreateAccumulatorRequest(accumulator=ref, spec=spec))

    def delete(self, calls: RawCalls) -> None:
        assert calls.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=REF)).deleted

    def push(self, value: float, size: int = 2, name: str = "net", step: int = 0) -> messages_pb2.PushPullRequest:
        self._num_calls += 1
        content = np.full(size, value, np.float32).tobytes()
        dense = tensor_pb2.Tensor(dtype=FLOAT32, shape=(size,), content=content)
        return messages_pb2.PushPullRequest(
            accumulator=accumulator_pb2.AccumulatorRef(name=name),
            num_required=1,
            local_step=step,
            gradient=[accumulator_pb2.ComponentGradient(name="w", dense=dense)],
            request_id=accumulator_pb2.RequestId(client_id="me", sequence=self._num_calls),
        )


@pytest.fixture
def tree() -> Iterator[Tree]:
    with ExitStack() as stack:
        yield Tree(stack)


def average_in(response: Any) -> Sequence[float]:
    values: Sequence[float] = np.frombuffer(response.average.components[0].dense.content, np.float32).tolist()
    return values


READ = messages_pb2.ReadAverageRequest(accumulator=REF)
TAKE = messages_pb2.TakeGradientRequest(accumulator=REF, num_required=1)


def test_the_average_of_a_deleted_one_is_not_that_of_its_successor(tree: Tree) -> None:
    tree.make(tree.near)
    assert average_in(tree.near.call("PushPull", tree.push(1))) == [1, 1]
    assert average_in(tree.near.call("ReadAverage", READ)) == [1, 1]
    tree.delete(tree.top)
    assert tree.near.fail("ReadAverage", READ).code is grpc.StatusCode.NOT_FOUND
    tree.make(tree.top)
    tree.top.call("PushPull", tree.push(5))
    assert average_in(tree.near.call("ReadAverage", READ)) == [5, 5]


def test_calls_go_upstream_for_one_incarnation(tree: Tree) -> None:
    tree.make(tree.near)
    tree.top.call("PushPull", tree.push(1))
    tree.sent.clear()
    tree.near.call("ReadAverage", READ)  # which is not here yet
    pushed = tree.push(1, step=1)
    tree.near.call("PushPull", pushed)
    apply = messages_pb2.ApplyGradientRequest(accumulator=REF, gradient=pushed.gradient, local_step=2)
    tree.near.call("ApplyGradient", apply)
    tree.near.call("TakeGradient", TAKE)
    (incarnation,) = tree.sent["PushPull"]
    assert incarnation
    assert tree.sent == {
        method: {incarnation}
        for method in ("PushPull", "ApplyGradient", "TakeGradient", "ReadAverage", "GetNumAccumulated")
    }


@pytest.mark.parametrize("method", ["PushPull", "ApplyGradient"])
def test_gradients_fit_the_one_that_is_there(tree: Tree, method: str) -> None:
    tree.make(tree.near)
    tree.near.call("PushPull", tree.push(1))
    tree.delete(tree.top)
    tree.make(tree.top, size=3)
    request: Any = tree.push(7, size=3)
    if method == "ApplyGradient":
        request = messages_pb2.ApplyGradientRequest(
            accumulator=REF, gradient=request.gradient, request_id=request.request_id
        )
    tree.near.call(method, request)
    if method == "ApplyGradient":
        assert average_in(tree.near.call("TakeGradient", TAKE)) == [7, 7, 7]
    assert average_in(tree.near.call("ReadAverage", READ)) == [7, 7, 7]
    assert tree.near.fail("PushPull", tree.push(1, step=1)).code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("deleted_at", ["top", "near"])
def test_a_gradient_of_a_deleted_one_is_not_in_its_successor(deleted_at: str) -> None:
    """It waits for another one here, and is then for an accumulator that is gone."""
    with ExitStack() as stack:
        tree = Tree(stack, workers=2)
        tree.make(tree.near)
        waiting = tree.near.start("PushPull", tree.push(1))
        eventually(lambda: tree.aggregator.inspect(_num_waiting), lambda number: number == 1)
        tree.delete(getattr(tree, deleted_at))
        tree.make(tree.near)
        error = waiting.exception()
        assert error.code() is grpc.StatusCode.NOT_FOUND
        asked = messages_pb2.GetNumAccumulatedRequest(accumulator=REF)
        assert tree.top.call("GetNumAccumulated", asked).num_accumulated == 0


def _num_waiting(server: Server) -> int:
    assert server.aggregator is not None
    return sum(each.batches.num_waiting for each in server.aggregator.accumulators.known)


class TestMemory:
    """The newest averages count in the aggregator's memory, and make room for whatever else needs it."""

    SIZE = 1 << 16
    BYTES = 4 * SIZE

    @pytest.fixture
    def tree(self) -> Iterator[Tree]:
        with ExitStack() as stack:
            yield Tree(stack, limits=LimitsConfig(max_bytes=ByteSize(3 * self.BYTES)))

    def used(self, tree: Tree) -> int:
        return tree.aggregator.inspect(lambda server: server.usage.memory.used)

    def test_the_newest_average_counts(self, tree: Tree) -> None:
        tree.make(tree.near, self.SIZE)
        for step in range(2):
            tree.near.call("PushPull", tree.push(1, self.SIZE, step=step))
            eventually(lambda: self.used(tree), lambda used: used == self.BYTES)
        tree.delete(tree.near)
        assert self.used(tree) == 0

    def test_averages_make_room(self, tree: Tree) -> None:
        for name in ("a", "b", "c", "d"):
            tree.make(tree.near, self.SIZE, name)
            tree.near.call("PushPull", tree.push(1, self.SIZE, name))
        eventually(lambda: self.used(tree), lambda used: used <= 3 * self.BYTES)
        upload = tensor_pb2.Tensor(dtype=FLOAT32, shape=(3 * self.SIZE,), content=bytes(3 * self.BYTES))
        tree.near.call("StoreTensors", tensor_messages_pb2.StoreTensorsRequest(tensors=[upload]))
        assert self.used(tree) == 3 * self.BYTES
