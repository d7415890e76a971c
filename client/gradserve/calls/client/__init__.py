"""The calls of clients, as users see them.

The blocking and the asyncio class take their signatures and docstrings from here.
"""

from __future__ import annotations

import contextlib

from gradserve.calls.accumulators.settling import not_durable, settle
from gradserve.calls.client.accumulators import AccumulatorsOfClient
from gradserve.calls.client.layers import LayersOfClient
from gradserve.calls.client.tensors import TensorsOfClient
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.calls.server import server_info
from gradserve.errors import GradserveError
from gradserve.results import ServerInfo


class ClientCalls(AccumulatorsOfClient, LayersOfClient, TensorsOfClient):
    """Calls of `Client`."""

    def server_info(self) -> Operation[ServerInfo]:
        """Describes the server: its version, devices, limits and load.

        Returns:
            A snapshot.
        """
        return server_info()

    def settle(self, timeout: float | None) -> Operation[None]:
        """Waits until the gradients that the client keeps are durable; see `gradserve.calls.accumulators.settling`."""
        return settle(self._accumulators.watch, self._closing if timeout is None else check_timeout(timeout))

    def note_on(self, error: BaseException) -> None:
        """Notes on an error that ends the use of the client what is not durable."""
        missing = not_durable(self._accumulators.watch, 0)
        if missing is not None:
            error.add_note(str(missing))

    def delete_private(self) -> Operation[None]:
        """Deletes everything made without a shared name or scope, as far as the server can be reached."""
        with contextlib.suppress(GradserveError):
            yield from self._private.delete_all()
