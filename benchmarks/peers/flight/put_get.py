"""A client that puts one array, or gets it, in record batches of `batch_bytes`.

A batch as large as the array arrives in one piece, like gradserve's tensors. Smaller batches are faster, but arrive in
many pieces; with `join` the receiver copies them into one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from benchmarks.peers.driver import Setup, Worker, run_worker

_NAME = b"x"


class PutGetWorker(Worker):
    """The array as a table, and the calls for both operations."""

    def __init__(self, setup: Setup) -> None:
        self._client = flight.FlightClient(setup.server["address"])
        self._array = np.random.default_rng(0).random(setup.num_floats, np.float32)
        self._batch_length = setup.options["batch_bytes"] // 4
        self._join = setup.options["join"]
        self._table = pa.table({"x": pa.array(self._array)})

    def _put(self) -> None:
        descriptor = flight.FlightDescriptor.for_path(_NAME)
        writer, _ = self._client.do_put(descriptor, self._table.schema)
        writer.write_table(self._table, max_chunksize=self._batch_length)
        writer.close()  # waits until the server has it all

    def _get(self) -> pa.Table:
        table = self._client.do_get(flight.Ticket(_NAME)).read_all()
        return table.combine_chunks() if self._join else table

    def _drop(self) -> None:
        list(self._client.do_action(flight.Action("drop", _NAME)))

    def _assert_equal(self, table: pa.Table) -> None:
        assert np.array_equal(table["x"].to_numpy(), self._array), "other data came back"


class PutWorker(PutGetWorker):
    """Puts an array, and drops it between steps."""

    def step(self) -> None:
        self._put()

    def settle(self) -> None:
        self._drop()

    def check(self) -> None:
        self._assert_equal(self._get())


class GetWorker(PutGetWorker):
    """Gets an array that was put once."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._put()
        self._result: Any = None

    def step(self) -> None:
        self._result = self._get()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._assert_equal(self._result)


def make_worker(setup: Setup) -> Worker:
    """Returns the worker for `operation`."""
    return {"put": PutWorker, "get": GetWorker}[setup.options["operation"]](setup)


if __name__ == "__main__":
    run_worker(make_worker, packages=["pyarrow"])
