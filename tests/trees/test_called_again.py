"""A call at an aggregator whose caller goes and calls again, at whatever stage its gradient is."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.errors import AbortedError, DeadlineExceededError
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_server.upstream.batches import Leaf
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator

REF = accumulator_pb2.AccumulatorRef(name="net")


class Gate:
    """An interceptor of the server upstream, which holds the first push_pull of some kind.

    Attributes:
        has_come: Set when it is there.
        go: Set it to let it go on.
    """

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.go = threading.Event()
        self.holds: Callable[[Any], bool] = lambda _: False
        self.error: Exception | None = None

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """See `Interceptor`."""

        async def held(request: Any, call: Call) -> Any:
            if method.name == "PushPull" and self.holds(request) and not self.has_come.is_set():
                self.has_come.set()
                await asyncio.to_thread(self.go.wait, PATIENCE_SECONDS)
                if self.error is not None:
                    raise self.error
            return await handle(request, call)

        return held


class Tree:
    """A server with a gate, and an aggregator.

    Attributes:
        gate: The gate.
        top: Calls at the server.
        near: Calls at the aggregator.
    """

    def __init__(self, stack: ExitStack, workers: int) -> None:
        self.gate = Gate()
        config = ServerConfig(runtime=NOT_WARMED_UP)
        server = stack.enter_context(LocalServer(config, Parts(interceptors=(self.gate,))))
        self._aggregator = stack.enter_context(aggregator(server.address, workers))
        self.top = stack.enter_context(RawCalls(server.address))
        self.near = stack.enter_context(RawCalls(self._aggregator.address))
        component = accumulator_pb2.ComponentSpec(
            name="w", dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=accumulator_pb2.PartialShape(dims=(1,))
        )
        spec = accumulator_pb2.AccumulatorSpec(components=[component])
        self.top.call("CreateAccumulator", messages_pb2.CreateAccumulatorRequest(accumulator=REF, spec=spec))

    def leaf(self, client: str) -> Leaf[Any, Any]:
        """Returns the call of a client that is under way at the aggregator."""

        def look(server: Server) -> Any:
            assert server.aggregator is not None
            (accumulator,) = server.aggregator.accumulators.known
            return accumulator.under_way._work[client, 1][1]

        leaf: Leaf[Any, Any] = self._aggregator.inspect(look)
        return leaf


@contextmanager
def tree_of(workers: int) -> Iterator[Tree]:
    """Runs a server and an aggregator, until the end of the block."""
    with ExitStack() as stack:
        tree = Tree(stack, workers)
        stack.callback(tree.gate.go.set)
        yield tree


def push_pull(client: str, value: float, timeout: float = PATIENCE_SECONDS) -> messages_pb2.PushPullRequest:
    dense = tensor_pb2.Tensor(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=(1,), content=np.array([value], np.float32).tobytes()
    )
    return messages_pb2.PushPullRequest(
        accumulator=REF,
        num_required=2,
        worker_id=client,
        gradient=[accumulator_pb2.ComponentGradient(name="w", dense=dense)],
        request_id=accumulator_pb2.RequestId(client_id=client, sequence=1),
        timeout=encode_duration(timeout),
    )


def average_in(call: Any) -> tuple[float, int]:
    response = messages_pb2.PushPullResponse.FromString(call.result(PATIENCE_SECONDS))
    (value,) = np.frombuffer(response.average.components[0].dense.content, np.float32)
    return value, response.average.num_gradients


def test_its_sum_is_refused_after_it_has_come_again() -> None:
    """Its gradient was given back when it went, and has to go alone."""
    with tree_of(workers=2) as tree:
        assert tree.top.fail("PushPull", push_pull("b", 3, timeout=0)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        tree.gate.holds = lambda request: bool(request.sum_of)  # which has a call that has come before
        first, other = [tree.near.start("PushPull", push_pull(*each)) for each in (("a", 1), ("b", 3))]
        assert tree.gate.has_come.wait(PATIENCE_SECONDS)
        leaf = tree.leaf("a")
        first.cancel()
        eventually(lambda: leaf.gradient is None)
        again = tree.near.start("PushPull", push_pull("a", 1))
        eventually(lambda: not leaf.is_left)
        tree.gate.go.set()
        assert average_in(again) == average_in(other) == (2, 2)


def test_it_waits_longer_when_it_comes_again() -> None:
    """Upstream, its wait ends with that of the first caller, and begins again."""
    with tree_of(workers=1) as tree:
        tree.gate.holds = lambda request: request.request_id.client_id == "a"
        tree.gate.error = DeadlineExceededError("too few gradients")
        assert tree.near.fail("PushPull", push_pull("a", 1, timeout=0)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert tree.gate.has_come.wait(PATIENCE_SECONDS)
        leaf = tree.leaf("a")
        again = tree.near.start("PushPull", push_pull("a", 1))
        eventually(lambda: not leaf.is_left)
        tree.gate.go.set()
        other = tree.near.start("PushPull", push_pull("b", 3))
        assert average_in(again) == average_in(other) == (2, 2)


class TestLeaf:
    async def test_the_gradient_is_read_where_the_latest_call_has_it(self) -> None:
        leaf = Leaf[str, str]("request", None)  # type: ignore[arg-type]
        first, again = object(), object()
        returned = leaf.lend(first)  # type: ignore[arg-type]
        async with leaf.borrowed() as read:
            assert read is first
            leaf.lend(again)  # type: ignore[arg-type]
            assert not returned.done()
        assert returned.done()
        assert leaf.gradient is again

    async def test_the_gradient_is_waited_for_while_a_caller_brings_it(self) -> None:
        leaf = Leaf[str, str]("request", None)  # type: ignore[arg-type]
        leaf.bring()
        gradient = object()

        async def borrow() -> object:
            async with leaf.borrowed() as read:
                return read

        borrowing = asyncio.create_task(borrow())
        await asyncio.sleep(0)
        leaf.lend(gradient)  # type: ignore[arg-type]
        assert await borrowing is gradient

    async def test_there_is_nobody_to_borrow_from(self) -> None:
        leaf = Leaf[str, str]("request", None)  # type: ignore[arg-type]
        leaf.bring()
        borrowing = asyncio.create_task(leaf.borrowed().__aenter__())
        await asyncio.sleep(0)
        leaf.brought()
        with pytest.raises(AbortedError, match="the caller left"):
            await borrowing
