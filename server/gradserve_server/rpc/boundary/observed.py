"""Counts and times every call."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import ServiceError
from gradserve_server.observe.call_record import CallRecord, Origin
from gradserve_server.observe.calls import Calls, MethodCalls
from gradserve_server.observe.logs.failures import FailureLog
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle
from gradserve_server.rpc.boundary.status import status_code

_log = logging.getLogger("gradserve_server.calls")

_KINDS = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


class ObservedCalls:
    """Notes the beginning and the end of every call. The outermost interceptor: it sees the errors that clients get.

    A call ends here when its answer is ready; serializing and sending that is not included.
    """

    def __init__(self, calls: Calls, failures: FailureLog) -> None:
        """Takes what counts the calls, and what logs those that fail."""
        self._calls = calls
        self._failures = failures

    def refuse(self, method: MethodDescriptor, origin: Callable[[], Origin], error: ServiceError) -> None:
        """Notes a call that was refused before the chain, because its payload could not be received."""
        calls = self._calls_of(method)
        calls.started += 1
        code = status_code(error).name
        self._calls.failed(method.full_name, code, error.message)
        record = CallRecord(method.full_name, time.monotonic(), origin)
        self._failures.failed(record, code, error.message)
        record.has_ended = True
        calls.end(code, 0.0, 0.0)

    def _calls_of(self, method: MethodDescriptor) -> MethodCalls:
        kind = _KINDS[method.client_streaming, method.server_streaming]
        return self._calls.of(method.containing_service.full_name, method.name, kind)

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that notes each call."""
        all_calls, failures, clock = self._calls, self._failures, time.monotonic
        calls = self._calls_of(method)
        name = method.full_name

        async def observed(request: Any, call: Call) -> Any:
            calls.started += 1
            began = clock()
            record = CallRecord(name, began, call.origin)
            code = "CANCELLED"
            try:
                response = await handle(request, call)
                code = "OK"
            except ServiceError as error:
                code = status_code(error).name
                all_calls.failed(name, code, error.message)
                failures.failed(record, code, error.message)
                raise
            except asyncio.CancelledError:
                if call.time_left() == 0.0:
                    code = "DEADLINE_EXCEEDED"
                raise
            finally:
                record.has_ended = True
                seconds = clock() - began
                calls.end(code, seconds, record.waited)
                if _log.isEnabledFor(logging.DEBUG):
                    _log.debug("%s: %s after %.6f s, %.6f of them waiting", name, code, seconds, record.waited)
            return response

        return observed
