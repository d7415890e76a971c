"""The admission of calls, until the server drains."""

from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.errors import UnavailableError
from gradserve_server.rpc.boundary.call import Call
from gradserve_server.rpc.boundary.chain import Handle


class Admission:
    """Admits calls until the server drains, and refuses them with UnavailableError from then on."""

    def __init__(self) -> None:
        self.is_open = True
        """Whether calls are admitted."""

    def check(self) -> None:
        """Raises UnavailableError while the server drains."""
        if not self.is_open:
            raise UnavailableError("the server is shutting down")

    def close(self) -> None:
        """Refuses all calls from now on."""
        self.is_open = False

    def around(self, _method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that passes on the admitted calls."""

        def admitted(request: Any, call: Call) -> Any:
            self.check()
            return handle(request, call)

        return admitted
