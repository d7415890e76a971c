"""The calls of clients, as users see them.

The blocking and the asyncio class take their signatures and docstrings from here.
"""

from __future__ import annotations

import contextlib

from gradserve.calls.client.accumulators import AccumulatorsOfClient
from gradserve.calls.client.layers import LayersOfClient
from gradserve.calls.client.tensors import TensorsOfClient
from gradserve.calls.exchange import Operation
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

    def delete_private(self) -> Operation[None]:
        """Deletes everything made without a shared name or scope, as far as the server can be reached."""
        with contextlib.suppress(GradserveError):
            yield from self._private.delete_all()
