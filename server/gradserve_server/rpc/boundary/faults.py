"""Turns unexpected errors into answers."""

import logging
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import InternalError, ResourceExhaustedError, ServiceError
from gradserve_server.observe.call_record import current_call
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle

_log = logging.getLogger(__name__)


class Faults:
    """Turns every exception into a ServiceError, and logs faults of the server.

    Clients learn of an unexpected error only that it happened.
    """

    def __init__(self, on_fault: Callable[[], object] = lambda: None) -> None:
        """Takes what is called after each fault of the server."""
        self._on_fault = on_fault

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that raises nothing but ServiceError."""
        name = method.full_name

        async def told(request: Any, call: Call) -> Any:
            try:
                return await handle(request, call)
            except InternalError:
                _log.exception("%s failed", name)
                self._on_fault()
                raise
            except ServiceError:
                raise
            except MemoryError:
                _log.exception("%s ran out of memory", name)
                raise ResourceExhaustedError("the server has no memory left for this call") from None
            except Exception:
                _log.exception("%s failed", name)
                self._on_fault()
                call_record = current_call()
                where = "" if call_record is None else f" under {call_record.request_id}"
                raise InternalError(f"internal error; the server's log has the details{where}") from None

        return told
