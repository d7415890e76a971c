"""Waits for what must be done to the payload of a call before anybody looks at it."""

from collections.abc import Awaitable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle


class PreparePayloads:
    """Has payloads prepared that are in the memory of a GPU: a client computes there while it calls."""

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle whose calls are prepared."""

        async def prepared(request: Any, call: Call) -> Any:
            assert call.prepare is not None, "asked before"
            await call.prepare()
            return await handle(request, call)

        def prepared_if_needed(request: Any, call: Call) -> Awaitable[Any]:
            return handle(request, call) if call.prepare is None else prepared(request, call)

        return handle if method.client_streaming or method.server_streaming else prepared_if_needed
