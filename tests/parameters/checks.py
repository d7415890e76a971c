"""Checks of parameters that several tests make."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gradserve_server.errors import ServiceError
from gradserve_server.parameters.parameters import Parameters
from tests.parameters.bench import ParametersBench
from tests.parameters.durable.disk import ledger_of, shape_of


@asynccontextmanager
async def emptied(bench: ParametersBench) -> AsyncIterator[ParametersBench]:
    """Deletes all parameters at the end of a block, and checks that they leave nothing behind."""
    yield bench
    for key, _ in list(bench.registry.all()):
        bench.registry.delete(key)
    await turns()
    assert (bench.memory.used, bench.bookkeeping.used, bench.factory.waiters.used) == (0, 0, 0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def fails(
    made: Parameters, error: type[ServiceError], call: Any, match: str | None = None, field: str = ""
) -> None:
    """Expects an error that changes nothing."""
    before = shape_of(made), ledger_of(made)
    with pytest.raises(error, match=match) as raised:
        await call
    assert field in ("", raised.value.field)
    assert (shape_of(made), ledger_of(made)) == before
