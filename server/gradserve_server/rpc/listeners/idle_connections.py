"""Ends idle connections where there is little room left for others."""

import asyncio
import os
from collections.abc import Collection

from gradserve_server.rpc.boundary.connections import DESCRIPTORS, clients_of, shut_down
from gradserve_server.rpc.boundary.open_calls import OpenCalls

_LOOK_SECONDS = 2.0
_IDLE_SECONDS = 60.0
"""A client that made a call is not idle for so long."""


class IdleConnections:
    """Keeps a quarter of the allowed connections free for newcomers, as far as others are idle.

    gRPC counts connections, but it does not say which of them are idle. So while there are many, the sockets of the
    process are compared with the clients of the latest calls.
    """

    def __init__(self, limit: int, calls: OpenCalls, look_seconds: float = _LOOK_SECONDS) -> None:
        """Takes the most connections, and the calls that are made over them."""
        self._keep = limit - limit // 4
        self._calls = calls
        self._look_seconds = look_seconds
        self._known: frozenset[str] = frozenset()

    async def keep_room(self, ports: Collection[int]) -> None:
        """Looks again and again at the connections to some ports, until it is cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            if len(os.listdir(DESCRIPTORS)) > self._keep:
                await self._look(ports)

    async def _look(self, ports: Collection[int]) -> None:
        connected = await asyncio.to_thread(clients_of, frozenset(ports))
        # A newcomer may not have got round to its first call.
        settled = [each for each in connected if each in self._known]
        self._known = frozenset(connected)
        too_many = len(connected) - self._keep
        if too_many > 0:
            since = asyncio.get_running_loop().time() - _IDLE_SECONDS
            ended = frozenset(self._calls.idle(settled, since)[:too_many])
            await asyncio.to_thread(shut_down, ended)
