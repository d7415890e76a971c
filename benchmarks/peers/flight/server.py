"""A Flight server that keeps received data in memory and returns it in the batches in which it came."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from benchmarks.peers.driver import Setup, run_server


class Store(flight.FlightServerBase):  # type: ignore[misc]
    """Tables by name."""

    def __init__(self, location: str, *, join: bool) -> None:
        super().__init__(location)
        self._join = join
        self._tables: dict[bytes, pa.Table] = {}

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        table = reader.read_all()
        self._tables[descriptor.path[0]] = table.combine_chunks() if self._join else table

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(self._tables[ticket.ticket])

    def do_action(self, context: Any, action: flight.Action) -> list[Any]:
        """Drops the table that the action's body names."""
        del self._tables[action.body.to_pybytes()]
        return []


@contextlib.contextmanager
def serve(setup: Setup) -> Iterator[dict[str, Any]]:
    """Runs the server."""
    with Store("grpc://127.0.0.1:0", join=setup.options["join"]) as server:
        threading.Thread(target=server.serve, daemon=True).start()
        yield {"address": f"grpc://127.0.0.1:{server.port}"}


if __name__ == "__main__":
    run_server(serve)
