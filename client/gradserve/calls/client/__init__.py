"""The calls of clients, as users see them.

The blocking and the asyncio class take their signatures and docstrings from here.
"""

from __future__ import annotations

import contextlib

from gradserve.calls.client.accumulators import AccumulatorsOfClient
from gradserve.calls.client.layers import LayersOfClient
from gradserve.calls.client.parameters import ParametersOfClient
from gradserve.calls.client.tensors import TensorsOfClient
from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import Operation, Work, check_timeout
from gradserve.calls.server import server_info, server_log, server_status
from gradserve.results import ServerInfo
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.server_status import ServerLog, ServerStatus


class ClientCalls(AccumulatorsOfClient, ParametersOfClient, LayersOfClient, TensorsOfClient):
    """Calls of `Client`."""

    def server_info(self) -> Operation[ServerInfo]:
        """Describes the server: its version, devices, limits and load.

        Returns:
            A snapshot.
        """
        return server_info()

    def server_status(
        self,
        *,
        container: str = "",
        name_contains: str = "",
        order: str = "latest",
        max_accumulators: int = 100,
        max_rounds: int = 20,
        max_workers: int = 50,
        max_past_runs: int = 0,
        request_id: int | None = None,
    ) -> Operation[ServerStatus]:
        """Takes a picture of the server: accumulators and parameters with their last rounds, workers, calls, errors.

        Args:
            container: The only container; empty for all in which the caller has a role.
            name_contains: A part of "container/name" of accumulators, parameters and layers, whatever its case.
            order: The order of accumulators and of parameters: "latest" for those whose last round ended last, "name",
                "rate" for the most rounds per second, "waiting" for the most waiting calls, or "bytes" for the most
                memory.
            max_accumulators: How many accumulators to describe, and how many parameters, at most 1,000.
            max_rounds: How many of the last rounds of each, at most 20.
            max_workers: How many workers, at most 1,000.
            max_past_runs: How many deleted accumulators and parameters, at most 256.
            request_id: The id of a call to look up, as errors have it; of a call that a client of the same identity has
                made. A number of up to 64 bits is one of this client's calls.

        Returns:
            The picture.

        Raises:
            InvalidArgumentError: The order is unknown, or a maximum is out of range.
        """
        call = None if request_id is None else self._ids.call(request_id)
        maxima = {
            "max_accumulators": max_accumulators,
            "max_rounds": max_rounds,
            "max_workers": max_workers,
            "max_past_runs": max_past_runs,
        }
        return server_status(container, name_contains, order, maxima, call)

    def new_request_id(self) -> Operation[int]:
        """Returns the id of a new call, for the argument `request_id` of one call of this client.

        Sends nothing. With an id that is known before, a call can be made again, and counts once, even if it was
        interrupted (Ctrl-C, a cancelled task) and so has left no error with an id.

        Returns:
            An integer that names the call in every client.
        """
        number: int = yield Work(self._ids.new_request_id)
        return number

    def server_log(
        self, *, max_lines: int = 100, level: str = "debug", contains: str = "", after: int = 0
    ) -> Operation[ServerLog]:
        """Returns the latest lines of the server's log.

        The server keeps the last 1,000, at the level at which it logs.

        Args:
            max_lines: How many lines, at most 1,000. Of more than a million characters, the latest lines.
            level: The lowest level: "debug", "info", "warning" or "error".
            contains: A part of the message, the logger or the request id, whatever its case.
            after: The number of the last line that is known: only later ones. Each run of the server begins with 1.

        Returns:
            The lines, the oldest first.

        Raises:
            InvalidArgumentError: The maximum is out of range, or the level is unknown.
            PermissionDeniedError: The caller has not the role of an admin in all containers.
        """
        return server_log(max_lines, level, contains, after)

    def settle(self, timeout: float | None) -> Operation[None]:
        """Waits until the gradients that the client keeps are durable; see `gradserve.calls.accumulators.session`."""
        return self._accumulators.settle(self._closing if timeout is None else check_timeout(timeout))

    def note_on(self, error: BaseException) -> None:
        """Notes on an error that ends the use of the client what is not durable."""
        missing = self._accumulators.not_durable()
        if missing is not None:
            error.add_note(str(missing))

    def end_leases(self) -> Operation[None]:
        """Ends the leases of the client, and so everything it made without a shared name or scope.

        Of servers that cannot be reached, they run out.
        """
        for target, lease in enumerate(self._leases):
            with contextlib.suppress(GradserveError):
                yield from at_target(target, lease.end())
