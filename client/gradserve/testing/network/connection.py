"""A connection through a proxy, which may fail, and the traffic of all of them."""

import asyncio
import contextlib

from gradserve.testing.network.end import End, Piece
from gradserve.testing.network.faults import ConnectionFault, ConnectionFaults

_LATE_SECONDS = 0.1
"""How long a late request waits at most for others to go before it."""


class Traffic:
    """What goes through all connections of a proxy. Belongs to the event loop that it was made on."""

    def __init__(self) -> None:
        self._may_pass, self._passed = asyncio.Event(), asyncio.Event()
        self._may_pass.set()

    def stop(self) -> None:
        """Passes on nothing more."""
        self._may_pass.clear()

    def go_on(self) -> None:
        """Passes on what was held back, and what comes from now on."""
        self._may_pass.set()

    async def passing(self) -> None:
        """Returns when a piece may pass."""
        await self._may_pass.wait()
        self._passed.set()

    async def others(self) -> None:
        """Returns when another piece has passed, or none does for a while."""
        self._passed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_SECONDS):
                await self._passed.wait()


_OF_REQUESTS = (ConnectionFault.CUT_REQUEST, ConnectionFault.CUT_AFTER_REQUEST, ConnectionFault.LATE_REQUEST)


class Connection:
    """Passes on what comes from either side, until its fault is due.

    Only a connection that was of some use fails.
    """

    def __init__(self, traffic: Traffic, faults: ConnectionFaults, reads_left: float, fault: ConnectionFault) -> None:
        self._traffic = traffic
        self._faults = faults
        self._reads_left = reads_left
        self._fault = fault
        self._established = False

    async def pass_requests(self, client: End, server: End) -> None:
        """Passes on what the client sends."""
        while (piece := await client.read()).data:
            await self._traffic.passing()
            match self._fault_of(*_OF_REQUESTS):
                case ConnectionFault.CUT_REQUEST:
                    return await server.write(piece.first_half)
                case ConnectionFault.CUT_AFTER_REQUEST:
                    return await server.write(piece)
                case ConnectionFault.LATE_REQUEST:
                    client.end()
                    await self._traffic.others()
                    return await server.write(piece)
            await server.write(piece)
        return None

    async def pass_replies(self, server: End, client: End) -> None:
        """Passes on what the server sends."""
        while (piece := await server.read()).data:
            await self._traffic.passing()
            match self._fault_of(ConnectionFault.DROP_REPLY, ConnectionFault.CUT_REPLY):
                case ConnectionFault.DROP_REPLY:
                    return await client.write(Piece(b"", piece.descriptors))
                case ConnectionFault.CUT_REPLY:
                    return await client.write(piece.first_half)
            await client.write(piece)
            self._established = True
        return None

    def _fault_of(self, *faults: ConnectionFault) -> ConnectionFault | None:
        """Counts what passes, and returns the fault that is due."""
        self._reads_left -= 1
        if self._fault not in faults or self._reads_left > 0 or not self._established:
            return None
        self._faults.happened[self._fault] += 1
        return self._fault
