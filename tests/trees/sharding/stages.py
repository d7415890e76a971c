"""Servers that stop at an exact stage of a round, for something to happen there."""

import asyncio
import threading
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import UnavailableError
from gradserve_server.rpc.boundary.chain import Call, Handle

_LOOK_SECONDS = 0.005


class Gate:
    """An interceptor of several servers, which holds the calls of some methods from a stage on.

    Attributes:
        has_come: Set when the stage has come.
    """

    def __init__(self) -> None:
        """Begins with a gate that is open for all."""
        self.has_come = threading.Event()
        self._lock = threading.Lock()
        self._methods: Collection[str] = ()
        self._num_free = self._num_answered = 0

    def close(self, methods: Collection[str], num_answers: int) -> None:
        """Closes the gate for later calls.

        Args:
            methods: Their methods.
            num_answers: So many are carried out before the stage, and the answer to the last of them is lost. 0: the
                stage comes before the first.
        """
        self._num_free, self._num_answered = num_answers, -num_answers
        self.has_come.clear()
        self._methods = methods

    def open(self) -> None:
        """Lets all calls go on: those that are held come late."""
        self._methods = ()

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """See `Interceptor`."""

        async def held(request: Any, call: Call) -> Any:
            if method.name not in self._methods:
                return await handle(request, call)
            with self._lock:
                self._num_free -= 1
                is_free = self._num_free >= 0
            if is_free:
                answer = await handle(request, call)
                with self._lock:
                    self._num_answered += 1
                    is_lost = not self._num_answered
                if not is_lost:
                    return answer
            if is_free or not self._num_answered:
                self.has_come.set()
            while method.name in self._methods:
                await asyncio.sleep(_LOOK_SECONDS)
            if is_free:
                raise UnavailableError("the answer was lost")
            return await handle(request, call)

        return held
