"""A server that loses replies: calls are carried out, and their clients learn nothing of it."""

import random
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import UnavailableError
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle


class LostReplies:
    """An interceptor that carries calls of some methods out and then answers some of them with UNAVAILABLE.

    Attributes:
        lost: The methods of the replies that were lost.
    """

    def __init__(self, methods: Collection[str], probability: float, seed: int) -> None:
        self.lost: list[str] = []
        self._methods = methods
        self._probability = probability
        self._seeded = random.Random(seed)

    @property
    def parts(self) -> Parts:
        """What to make a server with that does so."""
        return Parts(interceptors=(self,))

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        if method.name not in self._methods:
            return handle

        async def lose(request: Any, call: Call) -> Any:
            reply = await handle(request, call)
            if self._seeded.random() < self._probability:
                self.lost.append(method.name)
                raise UnavailableError("the reply was lost")
            return reply

        return lose
