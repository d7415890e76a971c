"""Good calls of all methods of the client use every method of the contract."""

import inspect
from collections.abc import Awaitable

import pytest
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Handle
from gradserve_testing import LocalServer
from tests.arguments.calls import make_ready, make_things, methods, ones
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import METHODS


class CalledMethods:
    """An interceptor that notes the names of the methods that are called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        def noting(request: object, call: object) -> Awaitable[object]:
            self.names.add(method.name)
            return handle(request, call)

        return noting


ON_SOCKETS = {"StoreTensors", "ReadTensors", "IssueTicket"}
"""The methods that only clients of sockets use."""
IN_CLUSTERS = {
    *("StageGradient", "ReduceGradients", "EndEpoch", "ForgetGradients"),
    *("StageUpdate", "CountUpdates", "ForgetUpdates"),
}
"""The methods that only clients of several servers use."""


def without_arguments(thing: object) -> list[str]:
    """Returns the methods that take no argument; those that end the thing come last."""
    found = [
        name
        for name, method in inspect.getmembers(thing, inspect.ismethod)
        if not name.startswith("_") and not inspect.signature(method).parameters
    ]
    return sorted(found, key=lambda name: name in ("delete", "close"))


@pytest.mark.usefixtures("_compiled_kernels")
async def test_the_client_uses_every_method() -> None:
    called = CalledMethods()
    with (
        LocalServer(parts=Parts(interceptors=(called,))) as local,
        gradserve.connect(local.address, timeout=PATIENCE_SECONDS, transport="grpc") as client,
    ):
        things = await make_things(client)
        for name in methods(gradserve):
            await make_ready(things, name)
            things.method(name)(**things.arguments(name))
        layer = client.batch_norm()
        layer.release(layer.forward(ones(2, 3)))
        for thing in ("dense", "sparse", "model", "parameters", "layer", "raw_ops", "client"):
            for method in without_arguments(things.objects[thing]):
                getattr(things.objects[thing], method)()
    assert sorted(METHODS.keys() - called.names - ON_SOCKETS - IN_CLUSTERS) == []
