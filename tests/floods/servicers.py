"""The servicers of a server, which tests call on its event loop."""

from collections.abc import Awaitable
from typing import Any

from google.protobuf import message_factory

from gradserve_protocol.tensors import WithContents
from gradserve_server.app import Server
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.boundary.messages import Serialized
from tests.floods.work import longest_turn
from tests.servers.raw_calls import METHODS

PARTS = 6000
"""The parts of a large request, of which there may be ten times as many."""
MOST_CALLS = 3 * PARTS
"""The most calls in a turn of the event loop: about two for each part, where all calls together are dozens for each."""
_MORE_CALLS = {
    "CudnnRNNCanonicalToParams": 12 * PARTS,
    "CudnnRNNParamsToCanonical": 12 * PARTS,
}
"""The same for methods that take no more parts than the tests give them."""

CALL = Call("test")


class Servicers:
    """The servicers of a running server, called on its event loop."""

    def __init__(self, server: Server) -> None:
        self._all = {service.descriptor.name: service.servicer for service in server.services.all}

    def of(self, service: str) -> object:
        """Returns the servicer of a service."""
        return self._all[service]

    async def call(self, method: str, request: Any, service: str = "AccumulatorService") -> Any:
        """Returns the answer of a method, if it leaves others their turns."""
        answer = await self.measure(method, getattr(self.of(service), method)(request, CALL))
        message = answer.message if isinstance(answer, WithContents) else answer
        if isinstance(message, Serialized):
            message = message_factory.GetMessageClass(METHODS[method].output_type).FromString(message.data)
        return WithContents(message, answer.contents) if isinstance(answer, WithContents) else message

    async def measure(self, method: str, work: Awaitable[Any]) -> Any:
        """Returns what some work of a method returns, if it leaves others their turns."""
        answer, longest = await longest_turn(work)
        assert longest < _MORE_CALLS.get(method, MOST_CALLS), f"{longest} calls in one turn of {method}"
        return answer
